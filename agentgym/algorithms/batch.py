"""Trajectories packed end to end, as every algorithm reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentgym.algorithms.recipe import Truncated
from agentgym.algorithms.signal import all_equal
from agentgym.types import Status, Trajectory

TRUNCATED = (Status.MAX_TURNS, Status.MAX_TOKENS, Status.ENV_LIMIT)


@dataclass(frozen=True, slots=True)
class Batch:
    """B trajectories, N tokens in all. Row b is tokens starts[b]:starts[b + 1]."""

    input_ids: Tensor  # [N] int64
    starts: Tensor  # [B + 1] int64
    action_mask: Tensor  # [N] bool, true on tokens the policy sampled
    rewards: Tensor  # [N] float32, outcome on the last action token
    logprobs: Tensor  # [N] float32, of the sampling policy; 0 where action_mask is false
    group_ids: Tensor  # [B] int64, equal for samples of one item
    # [B] bool, true where a limit ended the episode, not the task: horizon, context, the
    # simulator's own
    truncated: Tensor
    temperature: float  # the actions were sampled at
    # [B] int64, equal for sequences of one environment; None: all are of one
    env_ids: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def sequence(self) -> Tensor:
        """[N] int64: the sequence each token belongs to."""
        return torch.repeat_interleave(
            torch.arange(self.num_sequences), self.starts[1:] - self.starts[:-1]
        )

    @property
    def returns(self) -> Tensor:
        """[B] float32: undiscounted outcome of each sequence, read back from its tokens."""
        return torch.zeros(self.num_sequences).index_add_(
            0, self.sequence, self.rewards * self.action_mask
        )

    def select(self, sequences: Tensor) -> Batch:
        """The named sequences, in the order given. sequences: [R] int64."""
        spans = [
            torch.arange(int(self.starts[sequence]), int(self.starts[sequence + 1]))
            for sequence in sequences.tolist()
        ]
        tokens = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        return Batch(
            self.input_ids[tokens],
            _starts([len(span) for span in spans]),
            self.action_mask[tokens],
            self.rewards[tokens],
            self.logprobs[tokens],
            self.group_ids[sequences],
            self.truncated[sequences],
            self.temperature,
            None if self.env_ids is None else self.env_ids[sequences],
        )

    def with_shuffled_outcomes(self, *, seed: int, step: int) -> Batch:
        """The same sequences with each other's outcomes: a control under which nothing can be
        learned.
        """
        # of each sequence's last action token
        places = self.rewards.new_zeros(self.num_sequences, dtype=torch.int64).scatter_reduce(
            0, self.sequence[self.action_mask], self.action_mask.nonzero()[:, 0], "amax"
        )
        order = np.random.Generator(np.random.Philox(key=[seed, step + 3_000_000])).permutation(
            self.num_sequences
        )
        rewards = torch.zeros_like(self.rewards)
        rewards[places] = self.rewards[places[torch.from_numpy(order)]]
        return replace(self, rewards=rewards)


def learnable(trajectories: Sequence[Trajectory], *, truncated: Truncated) -> list[Trajectory]:
    """Those that may be learned from, in order.

    Failed environments never are, nor sequences without a single action; with truncated "mask"
    neither are episodes cut by the horizon, the context or the simulator's own limit.
    """
    return [
        t
        for t in trajectories
        if t.status.is_valid
        and any(t.action_mask)
        and not (truncated == "mask" and t.status in TRUNCATED)
    ]


def groups_with_signal(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The episodes of items whose rewards differ: only these tell better from worse.
    Source: DAPO, arXiv:2503.14476.
    """
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(trajectory.item.item_id, []).append(trajectory.reward)
    telling = {item_id for item_id, group in rewards.items() if not all_equal(group)}
    return [trajectory for trajectory in trajectories if trajectory.item.item_id in telling]


def overlong_penalty(
    trajectory: Trajectory, *, context_tokens: int, buffer: float, penalty: float
) -> float:
    """From 0 to -`penalty` over the last `buffer` (a share, 0 .. 1) of the budget of turns or
    tokens, whichever is nearer its end.

    DAPO (arXiv:2503.14476) counts the tokens of one answer; an episode of many turns has two
    budgets.
    """
    used = max(
        len(trajectory.turns) / trajectory.max_turns, len(trajectory.input_ids) / context_tokens
    )
    return -penalty * min(1.0, max(0.0, (used - (1 - buffer)) / buffer))


def to_batch(
    trajectories: Sequence[Trajectory],
    *,
    truncated: Truncated = "zero",
    penalty: Callable[[Trajectory], float] = lambda _: 0.0,
) -> Batch:
    """Pack the trajectories that may be learned from (see `learnable`), in order. penalty: added
    to each one's outcome.

    Errors: ValueError where nothing is left, or where samples of different temperatures meet.
    """
    kept = learnable(trajectories, truncated=truncated)
    if not kept:
        raise ValueError(
            f"none of {len(trajectories)} trajectories can be learned from:"
            f" {sorted({str(t.status) for t in trajectories})}"
        )
    temperatures = {trajectory.temperature for trajectory in kept}
    if len(temperatures) > 1:
        raise ValueError(f"one batch, one temperature; got {sorted(temperatures)}")
    groups: dict[str, int] = {}
    envs: dict[str, int] = {}
    lengths = [len(trajectory.input_ids) for trajectory in kept]
    batch = Batch(
        input_ids=torch.tensor([token for t in kept for token in t.input_ids]),
        starts=_starts(lengths),
        action_mask=torch.tensor([action for t in kept for action in t.action_mask]),
        rewards=torch.zeros(sum(lengths)),
        logprobs=torch.tensor(
            [logprob for t in kept for logprob in t.logprobs], dtype=torch.float32
        ),
        group_ids=torch.tensor([groups.setdefault(t.item.item_id, len(groups)) for t in kept]),
        truncated=torch.tensor([t.status in TRUNCATED for t in kept]),
        temperature=temperatures.pop(),
        env_ids=torch.tensor([envs.setdefault(t.item.env, len(envs)) for t in kept]),
    )
    outcomes = torch.tensor([(t.reward or 0.0) + penalty(t) for t in kept], dtype=torch.float32)
    for sequence, trajectory in enumerate(kept):
        last_action = max(index for index, action in enumerate(trajectory.action_mask) if action)
        batch.rewards[int(batch.starts[sequence]) + last_action] = outcomes[sequence]
    assert torch.equal(batch.returns, outcomes), (
        "an outcome was put on a token the policy did not sample"
    )
    return batch


def _starts(lengths: Sequence[int]) -> Tensor:
    """[B + 1] int64."""
    return torch.cumsum(torch.tensor([0, *lengths], dtype=torch.int64), 0)
