"""Advantage functions: pure, tensors in, tensors out.

Each gives ([n] advantages of the action tokens, [n] targets of the critic or None).
"Next", "discount" and "sum" run over action tokens, whatever observations lie between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.algorithms.signal import differ

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Experience:
    """What an advantage function may look at: the n action tokens of a global batch of B sequences,
    in sequence order.
    """

    sequence: Tensor  # [n] int64, ascending
    # [n] float32: the outcome on each sequence's last action token, plus what is paid per token
    rewards: Tensor
    group_ids: Tensor  # [B] int64, 0 .. G - 1, equal for samples of one item
    gamma: float = 1.0
    gae_lambda: float = 1.0
    values: Tensor | None = None  # [n] of the state each token is chosen in
    # [B] of the state after the last action: 0 where the episode was over
    end_values: Tensor | None = None
    # [B] int64, equal for sequences of one environment; None: all are of one
    env_ids: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.group_ids)

    @property
    def returns(self) -> Tensor:
        """[B] undiscounted sum of each sequence's rewards."""
        return torch.zeros(self.num_sequences).index_add_(0, self.sequence, self.rewards)


# Result: ([n] advantages, [n] targets of the critic or None)
AdvantageFunction = Callable[[Experience], tuple[Tensor, Tensor | None]]


def grpo(experience: Experience) -> tuple[Tensor, None]:
    """[n]: each return standardized within its group, equal for all action tokens of a sequence.

    The deviation is the sample one (n - 1).
    A group whose returns are all equal gets zeros, and so does a group left with one member: there
    is nothing to compare it with.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    centred, sizes = _centred(experience)
    groups = experience.group_ids
    variances = torch.zeros(len(sizes)).index_add_(0, groups, centred**2) / (sizes - 1).clamp(min=1)
    return (centred / (variances.sqrt()[groups] + EPS))[experience.sequence], None


def dr_grpo(experience: Experience) -> tuple[Tensor, None]:
    """Each return minus its group's mean: [n]. Source: arXiv:2503.20783."""
    return _centred(experience)[0][experience.sequence], None


def rloo(experience: Experience) -> tuple[Tensor, None]:
    """Each return minus the mean of the others in its group: [n]; a group of one gets zero.
    Source: arXiv:2402.14740.
    """
    centred, sizes = _centred(experience)
    own = sizes[experience.group_ids]
    return (centred * own / (own - 1).clamp(min=1))[experience.sequence], None


def reinforce_plus_plus(experience: Experience) -> tuple[Tensor, None]:
    """The discounted sum of what follows each token, whitened over the global batch: [n].
    Source: arXiv:2501.03262.
    """
    return _whitened(experience, _backwards(experience, experience.rewards, experience.gamma)), None


def reinforce_plus_plus_baseline(experience: Experience) -> tuple[Tensor, None]:
    """Each return minus its group's mean, whitened over the global batch's tokens: [n].
    Source: arXiv:2501.03262.
    """
    return _whitened(experience, _centred(experience)[0][experience.sequence]), None


def gae(experience: Experience) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over action tokens, whitened: [n]; the critic's targets
    are advantage + value, not whitened: [n].

    Source: arXiv:1506.02438. Errors: ValueError where there are no values.
    """
    values, ends = experience.values, experience.end_values
    if values is None or ends is None:
        raise ValueError("GAE needs a critic's values; use a recipe that has a critic")
    is_last = _is_last(experience.sequence)
    following = torch.where(is_last, ends[experience.sequence], values.roll(-1))
    deltas = experience.rewards + experience.gamma * following - values
    advantages = _backwards(experience, deltas, experience.gamma * experience.gae_lambda)
    return _whitened(experience, advantages), advantages + values


def whiten(values: Tensor) -> Tensor:
    """Mean 0 and sample deviation (n - 1) 1 over all of [n]; zeros where all are equal (see
    `differ`) or alone.
    """
    if len(values) < 2 or not differ(values.min(), values.max()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + EPS)


def _whitened(experience: Experience, values: Tensor) -> Tensor:
    """[n] values, whitened among the tokens of one environment: the reward scale of one must
    not set the step size of another.
    """
    if experience.env_ids is None:
        return whiten(values)
    result, env = torch.zeros_like(values), experience.env_ids[experience.sequence]
    for each in torch.unique(env):
        result[env == each] = whiten(values[env == each])
    return result


def _centred(experience: Experience) -> tuple[Tensor, Tensor]:
    """([B] return minus its group's mean, exactly 0 in a group of equal returns, see `differ`;
    [G] sizes of the groups).
    """
    returns, groups = experience.returns, experience.group_ids
    num_groups = int(groups.max()) + 1
    sizes = torch.zeros(num_groups).index_add_(0, groups, torch.ones_like(returns))
    means = torch.zeros(num_groups).index_add_(0, groups, returns) / sizes.clamp(min=1)
    low = torch.full((num_groups,), torch.inf).scatter_reduce(0, groups, returns, "amin")
    high = torch.full((num_groups,), -torch.inf).scatter_reduce(0, groups, returns, "amax")
    return torch.where(differ(low, high)[groups], returns - means[groups], 0.0), sizes


def _is_last(sequence: Tensor) -> Tensor:
    """[n] true on the last token of each sequence."""
    return torch.cat([sequence[1:] != sequence[:-1], torch.ones(1, dtype=torch.bool)])


def _backwards(experience: Experience, values: Tensor, discount: float) -> Tensor:
    """[n] of sums v_t + discount * v_t+1 + discount^2 * v_t+2 ... to the end of each sequence."""
    counts = torch.bincount(experience.sequence, minlength=experience.num_sequences)
    column = torch.arange(len(values)) - (torch.cumsum(counts, 0) - counts)[experience.sequence]
    padded = torch.zeros(experience.num_sequences, int(counts.max()) + 1)
    padded[experience.sequence, column] = values
    for step in range(padded.shape[1] - 2, -1, -1):
        padded[:, step] += discount * padded[:, step + 1]
    return padded[experience.sequence, column]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}
