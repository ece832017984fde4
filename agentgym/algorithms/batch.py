"""Trajectories packed end to end, the input of every algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from agentgym.algorithms.recipe import Truncated, all_equal
from agentgym.types import Trajectory

T = TypeVar("T", "Batch", "Experience")
NOT_ASKED = math.inf  # no engine gives it, and NaN is what a broken one gives


@dataclass(frozen=True, slots=True)
class Batch:
    """B trajectories, N tokens in all. Trajectory b is tokens starts[b]:starts[b + 1]."""

    input_ids: Tensor  # [N] int64
    starts: Tensor  # [B + 1] int64
    action_mask: Tensor  # [N] bool, true on tokens the policy sampled
    # [N] float32: the outcome on the last action token, or each turn's reward on its last token
    rewards: Tensor
    # [N] float32, of the sampling policy; 0 where action_mask is false, NOT_ASKED on action tokens
    # whose log-probability the engine was not asked for
    logprobs: Tensor
    group_ids: Tensor  # [B] int64, equal for samples of one item
    # [B] bool, true if a limit cut the episode (horizon, context or the simulator's own)
    truncated: Tensor
    temperature: float  # of sampling
    # [B] int64, equal for sequences of one environment; None: all are of one
    env_ids: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each sequence."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def sequence(self) -> Tensor:
        """[N] int64: the sequence each token belongs to."""
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=self.starts.device), self.lengths
        )

    @property
    def turn(self) -> Tensor:
        """[N] int64: the turn of each action token, counted from 0 over the whole batch.

        A run of action tokens within a sequence is one turn. An observation token has the number
        of the turn before it, -1 before the first turn of the batch.
        """
        begins = self.action_mask.clone()
        begins[1:] &= ~self.action_mask[:-1]
        begins[self.starts[:-1]] = self.action_mask[self.starts[:-1]]
        return torch.cumsum(begins, 0) - 1

    @property
    def returns(self) -> Tensor:
        """[B] float32: undiscounted sum of the rewards on each sequence's action tokens."""
        return self.rewards.new_zeros(self.num_sequences).index_add_(
            0, self.sequence, self.rewards * self.action_mask
        )

    def to(self, device: torch.device) -> Batch:
        return _moved(self, device)

    def select(self, sequences: Tensor) -> Batch:
        """Return a batch of these sequences, in this order. sequences: [R] int64 indices."""
        bounds = self.starts.tolist()
        spans = [
            torch.arange(bounds[sequence], bounds[sequence + 1]) for sequence in sequences.tolist()
        ]
        tokens = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        tokens = tokens.to(self.starts.device)
        return Batch(
            self.input_ids[tokens],
            _starts([len(span) for span in spans]).to(self.starts.device),
            self.action_mask[tokens],
            self.rewards[tokens],
            self.logprobs[tokens],
            self.group_ids[sequences],
            self.truncated[sequences],
            self.temperature,
            None if self.env_ids is None else self.env_ids[sequences],
        )

    def with_shuffled_outcomes(self, *, seed: int, step: int) -> Batch:
        """Return the batch with outcomes permuted among sequences: a control that has no signal.
        Only rewards on last action tokens are permuted; all others become 0.
        seed, step: equal ones give the same permutation.
        """
        # index of each sequence's last action token
        positions = self.rewards.new_zeros(self.num_sequences, dtype=torch.int64).scatter_reduce(
            0, self.sequence[self.action_mask], self.action_mask.nonzero()[:, 0], "amax"
        )
        order = np.random.Generator(np.random.Philox(key=[seed, step + 3_000_000])).permutation(
            self.num_sequences
        )
        rewards = torch.zeros_like(self.rewards)
        rewards[positions] = self.rewards[positions[torch.from_numpy(order)]]
        return replace(self, rewards=rewards)


def learnable(
    trajectories: Sequence[Trajectory], *, truncated: Truncated, signal: bool = False
) -> list[Trajectory]:
    """Return the trajectories that may be learned from, in order; parameters as in `why_not`."""
    reasons = why_not(trajectories, truncated=truncated, signal=signal)
    return [episode for episode, reason in zip(trajectories, reasons, strict=True) if not reason]


def why_not(
    trajectories: Sequence[Trajectory], *, truncated: Truncated, signal: bool = False
) -> list[str]:
    """Return for each trajectory the reason why it must not be learned from; "" if it may.

    All learning code uses this function. Excluded are episodes whose status is not valid and those
    without an action; with truncated "mask" also episodes cut by horizon, context or simulator.
    signal: also exclude all episodes of an item whose rewards are equal (DAPO, arXiv:2503.14476).
    """
    telling = _telling(trajectories) if signal else set()

    def reason(trajectory: Trajectory) -> str:
        if not trajectory.status.is_valid:
            return f"the environment failed: {trajectory.status}"
        if signal and trajectory.item.item_id not in telling:
            return "its group had equal rewards"
        if not any(trajectory.action_mask):
            return "no action"
        is_cut = truncated == "mask" and trajectory.status.is_truncated
        return f"cut: {trajectory.status}" if is_cut else ""

    return [reason(trajectory) for trajectory in trajectories]


def _telling(trajectories: Sequence[Trajectory]) -> set[str]:
    """Return the ids of items whose trajectories have different rewards, None not counted."""
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(trajectory.item.item_id, []).append(trajectory.reward)
    return {item_id for item_id, group in rewards.items() if not all_equal(group)}


def overlong_penalty(
    trajectory: Trajectory, *, context_tokens: int, buffer: float, penalty: float
) -> float:
    """Return a penalty <= 0: 0 until only `buffer` (a share, above 0 and at most 1) of a budget is
    left, then falling linearly to -`penalty` where the budget ends.

    The trajectory has two budgets, its `max_turns` turns and `context_tokens` tokens; the one of
    which the larger share is used counts. DAPO (arXiv:2503.14476) counts one answer's tokens.
    """
    used = max(
        len(trajectory.turns) / trajectory.max_turns, len(trajectory.input_ids) / context_tokens
    )
    return -penalty * min(1.0, max(0.0, (used - (1 - buffer)) / buffer))


def to_batch(
    trajectories: Sequence[Trajectory],
    *,
    penalty: Callable[[Trajectory], float] = lambda _: 0.0,
    turn_rewards: bool = False,
) -> Batch:
    """Pack trajectories that may be learned from (see `learnable`), in order.

    penalty: gives the number to add to a trajectory's outcome, on the last action token.
    turn_rewards: True puts each turn's reward on the turn's last token, False puts the outcome on
    the trajectory's last action token.
    Errors: ValueError if there is no trajectory, one may not be learned from, or temperatures
    differ; AssertionError if rewards of turns do not sum to the outcome.
    """
    reasons = [reason for reason in why_not(trajectories, truncated="zero") if reason]
    if reasons or not trajectories:
        raise ValueError(
            f"{len(reasons)} of {len(trajectories)} trajectories cannot be learned from:"
            f" {sorted(set(reasons))}"
        )
    temperatures = {trajectory.temperature for trajectory in trajectories}
    if len(temperatures) > 1:
        raise ValueError(f"one batch, one temperature; got {sorted(temperatures)}")
    groups: dict[str, int] = {}
    envs: dict[str, int] = {}
    lengths = [len(trajectory.input_ids) for trajectory in trajectories]
    starts = _starts(lengths)
    penalties = [penalty(trajectory) for trajectory in trajectories]
    rewards = torch.zeros(sum(lengths))
    for start, trajectory, added in zip(starts.tolist(), trajectories, penalties, strict=False):
        # summed before they are rounded to float32
        token_rewards = {_last_action(trajectory): added}
        for index, reward in _paid(trajectory, turn_rewards):
            token_rewards[index] = reward + token_rewards.get(index, 0.0)
        for index, reward in token_rewards.items():
            rewards[start + index] = reward
    batch = Batch(
        input_ids=torch.tensor([token for t in trajectories for token in t.input_ids]),
        starts=starts,
        action_mask=torch.tensor([action for t in trajectories for action in t.action_mask]),
        rewards=rewards,
        logprobs=torch.tensor(
            [
                NOT_ASKED if logprob is None else logprob
                for trajectory in trajectories
                for logprob in trajectory.engine_logprobs
            ],
            dtype=torch.float32,
        ),
        group_ids=torch.tensor(
            [groups.setdefault(t.item.item_id, len(groups)) for t in trajectories]
        ),
        truncated=torch.tensor([t.status.is_truncated for t in trajectories]),
        temperature=temperatures.pop(),
        env_ids=torch.tensor([envs.setdefault(t.item.env, len(envs)) for t in trajectories]),
    )
    outcomes = torch.tensor(
        [(t.reward or 0.0) + added for t, added in zip(trajectories, penalties, strict=True)]
    )
    torch.testing.assert_close(
        batch.returns,
        outcomes,
        msg="an outcome was put on a token the policy did not sample, or turns do not sum to it",
    )
    return batch


def _paid(trajectory: Trajectory, turn_rewards: bool) -> list[tuple[int, float]]:
    """Return (index in the trajectory, reward) of rewarded tokens. turn_rewards: as `to_batch`."""
    if not turn_rewards:
        return [(_last_action(trajectory), trajectory.reward or 0.0)]
    return [(turn.end - 1, turn.reward) for turn in trajectory.turns]


def _last_action(trajectory: Trajectory) -> int:
    return max(index for index, action in enumerate(trajectory.action_mask) if action)


def _starts(lengths: Sequence[int]) -> Tensor:
    """Index of each trajectory's first token, then the number of all tokens: [B + 1] int64."""
    return torch.cumsum(torch.tensor([0, *lengths], dtype=torch.int64), 0)


def _moved(record: T, device: torch.device) -> T:
    """Return a batch or an experience with its tensors on another device."""
    moved: dict[str, Any] = {
        part.name: value.to(device)
        for part in fields(record)
        if isinstance(value := getattr(record, part.name), Tensor | Batch)
    }
    return replace(record, **moved)


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch of B sequences, with the inputs of advantages and losses for its n action tokens."""

    batch: Batch
    # [n] float32: the batch's rewards plus rewards per token, for example a KL penalty
    rewards: Tensor
    # These three are None if the update computes them itself (see `Learner.prepare`).
    logprobs: Tensor | None = None  # [n] of the learner before the update, nats
    # [n] factor of each token's loss that corrects the mismatch of learner and engine
    corrections: Tensor | None = None
    entropies: Tensor | None = None  # [n] of the learner's distributions before the update, nats
    # [n] log-probabilities of the reference model, if there is a KL penalty
    reference: Tensor | None = None
    values: Tensor | None = None  # [n] critic's value of the state in which each token is chosen
    # [B] critic's value of the state after the last action, 0 if the episode was over
    end_values: Tensor | None = None
    advantages: Tensor | None = None  # [n]
    targets: Tensor | None = None  # [n] for the critic
    metrics: dict[str, float] = field(default_factory=dict)  # by name

    @property
    def sequence(self) -> Tensor:
        """[n] int64, ascending: the sequence each token belongs to."""
        return self.batch.sequence[self.batch.action_mask]

    @property
    def turn(self) -> Tensor:
        """[n] int64, ascending from 0: the turn each token belongs to."""
        return self.batch.turn[self.batch.action_mask]

    @property
    def returns(self) -> Tensor:
        """[B] undiscounted sum of each sequence's rewards, penalties included."""
        none = self.rewards.new_zeros(self.batch.num_sequences)
        return none.index_add_(0, self.sequence, self.rewards)

    def to(self, device: torch.device) -> Experience:
        return _moved(self, device)

    @property
    def critic_metrics(self) -> dict[str, float]:
        """`critic/value_mean`: mean of the critic's values. `critic/explained_variance`: share of
        the targets' variance that they explain; 0 for equal targets. {} without values or targets.
        """
        if self.values is None or self.targets is None:
            return {}
        spread = float(self.targets.var()) if len(self.targets) > 1 else 0.0
        explained = 1 - float((self.targets - self.values).var()) / spread if spread else 0.0
        mean = float(self.values.mean())
        return {"critic/value_mean": mean, "critic/explained_variance": explained}
