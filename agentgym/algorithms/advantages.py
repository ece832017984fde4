"""Advantage functions: pure, tensors in, tensors out.

Each returns ([n] advantages of the n action tokens of an `Experience`, [n] targets of the critic,
None without a critic). Sums and discounts run over action tokens; observations are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from agentgym.algorithms.batch import Experience
from agentgym.algorithms.recipe import differ, named, recipe_of

EPS = 1e-6


class Algorithm(Protocol):
    """Setting that every section `algorithm` of the configuration has."""

    recipe: str


class Discounting(Protocol):
    """Settings of advantage functions that discount rewards."""

    gamma: float


class Estimating(Discounting, Protocol):
    """Settings of advantage functions with a critic."""

    gae_lambda: float


# (experience, the section `algorithm`) -> ([n] advantages, [n] targets of the critic or None)
AdvantageFunction = Callable[[Experience, Any], tuple[Tensor, Tensor | None]]


def with_advantages(experience: Experience, algorithm: Algorithm) -> Experience:
    """Return the experience with the recipe's advantages, and targets if the recipe has a critic.

    algorithm: the section of the configuration; its `recipe` decides the advantage function.
    Errors: ValueError if the function does not return one finite number per action token; those of
    `recipe_of` and `named`.
    """
    function: AdvantageFunction = named(ADVANTAGES, recipe_of(algorithm.recipe).advantages)
    advantages, targets = function(experience, algorithm)
    for what, values in (("advantages", advantages), ("targets", targets)):
        if values is not None and (
            values.shape != experience.rewards.shape or not values.isfinite().all()
        ):
            raise ValueError(
                f"recipe {algorithm.recipe}: {what} of shape {list(values.shape)}, expected one"
                f" finite number for each of {len(experience.rewards)} action tokens"
            )
    return replace(experience, advantages=advantages, targets=targets)


def grpo(experience: Experience, _: object) -> tuple[Tensor, None]:
    """Standardize each return within its group: [n], equal for all action tokens of a sequence.

    The standard deviation has the divisor k - 1 for k members; EPS is added to it.
    A group whose returns are all equal gets zeros. So does a group with one member left, because
    there is nothing to compare it with.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    centred, sizes = _centred(experience)
    groups = experience.batch.group_ids
    squares = torch.zeros_like(sizes).index_add_(0, groups, centred**2)
    variances = squares / (sizes - 1).clamp(min=1)
    return (centred / (variances.sqrt()[groups] + EPS))[experience.sequence], None


def dr_grpo(experience: Experience, _: object) -> tuple[Tensor, None]:
    """Subtract the group's mean from each return: [n], equal in a sequence. arXiv:2503.20783."""
    return _centred(experience)[0][experience.sequence], None


def rloo(experience: Experience, _: object) -> tuple[Tensor, None]:
    """Subtract the mean of the group's other returns from each return: [n]. A group of one gets
    zeros. Source: arXiv:2402.14740.
    """
    centred, sizes = _centred(experience)
    group_sizes = sizes[experience.batch.group_ids]
    return (centred * group_sizes / (group_sizes - 1).clamp(min=1))[experience.sequence], None


def reinforce_plus_plus(experience: Experience, algorithm: Discounting) -> tuple[Tensor, None]:
    """Sum the discounted rewards from each action token on: [n], whitened over all action tokens
    of an environment in the global batch. Source: arXiv:2501.03262.
    """
    num_sequences = experience.batch.num_sequences
    following = _backwards(experience.sequence, num_sequences, experience.rewards, algorithm.gamma)
    return _whitened(experience, following), None


def reinforce_plus_plus_baseline(experience: Experience, _: object) -> tuple[Tensor, None]:
    """Subtract the group's mean from each return: [n], whitened over all action tokens of an
    environment in the global batch. Source: arXiv:2501.03262.
    """
    return _whitened(experience, _centred(experience)[0][experience.sequence]), None


def gae(experience: Experience, algorithm: Estimating) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over action tokens, whitened by environment: [n].
    The critic's targets are the value plus the advantage before whitening: [n].

    Source: arXiv:1506.02438. Errors: ValueError if the experience has no values of a critic.
    """
    values, ends = _values(experience)
    advantages = _gae(experience.sequence, experience.rewards, values, ends, algorithm)
    return _whitened(experience, advantages), advantages + values


def turn_gae(experience: Experience, algorithm: Estimating) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation with a turn as the time step: [n], equal for all tokens of
    a turn, whitened over the tokens of each environment; the critic's targets: [n].

    A turn's reward is the sum of its tokens' rewards. Its value is that of its first token. The
    target of all its tokens is this value plus the turn's advantage before whitening.
    Errors: ValueError if the experience has no values of a critic.
    """
    values, ends = _values(experience)
    turn = experience.turn
    num_turns = int(turn[-1]) + 1
    first = torch.searchsorted(turn, torch.arange(num_turns, device=turn.device))
    rewards = values.new_zeros(num_turns).index_add_(0, turn, experience.rewards)
    at_turns = values[first]
    advantages = _gae(experience.sequence[first], rewards, at_turns, ends, algorithm)
    return _whitened(experience, advantages[turn]), (advantages + at_turns)[turn]


def _values(experience: Experience) -> tuple[Tensor, Tensor]:
    if experience.values is None or experience.end_values is None:
        raise ValueError("GAE needs a critic's values; use a recipe that has a critic")
    return experience.values, experience.end_values


def _gae(
    sequence: Tensor, rewards: Tensor, values: Tensor, ends: Tensor, algorithm: Estimating
) -> Tensor:
    """Generalized advantage estimates of m time steps (action tokens or turns): [m].

    sequence: [m] int64, ascending. rewards, values: [m]. ends: [B] value after each last step.
    """
    last = sequence.new_ones(1, dtype=torch.bool)
    is_last = torch.cat([sequence[1:] != sequence[:-1], last])  # [m] last step of a sequence
    following = torch.where(is_last, ends[sequence], values.roll(-1))
    deltas = rewards + algorithm.gamma * following - values
    return _backwards(sequence, len(ends), deltas, algorithm.gamma * algorithm.gae_lambda)


def whiten(values: Tensor) -> Tensor:
    """Shift and scale [n] values to mean 0 and standard deviation 1 (divisor n - 1).

    Zeros if all values are equal (see `differ`) or there is only one.
    """
    if len(values) < 2 or not differ(values.min(), values.max()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + EPS)


def _whitened(experience: Experience, values: Tensor) -> Tensor:
    """Whiten [n] values of each environment separately: the scale of one environment's rewards must
    not change the step size of another. Without `env_ids` all values are whitened together.
    """
    if experience.batch.env_ids is None:
        return whiten(values)
    result, env_ids = torch.zeros_like(values), experience.batch.env_ids[experience.sequence]
    for env_id in torch.unique(env_ids):
        result[env_ids == env_id] = whiten(values[env_ids == env_id])
    return result


def _centred(experience: Experience) -> tuple[Tensor, Tensor]:
    """Return ([B] return minus its group's mean, [G] sizes of the groups).

    The difference is exactly 0 in a group of equal returns, see `differ`.
    """
    returns, groups = experience.returns, experience.batch.group_ids
    per_group = returns.new_zeros(int(groups.max()) + 1)
    sizes = per_group.index_add(0, groups, torch.ones_like(returns))
    means = per_group.index_add(0, groups, returns) / sizes.clamp(min=1)
    low = (per_group + torch.inf).scatter_reduce(0, groups, returns, "amin")
    high = (per_group - torch.inf).scatter_reduce(0, groups, returns, "amax")
    return torch.where(differ(low, high)[groups], returns - means[groups], 0.0), sizes


def _backwards(sequence: Tensor, num_sequences: int, values: Tensor, discount: float) -> Tensor:
    """Discounted sums v_t + discount * v_t+1 + discount^2 * v_t+2 ... to the end of each sequence.

    sequence: [m] int64, ascending; values: [m]. Result: [m].
    """
    counts = torch.bincount(sequence, minlength=num_sequences)
    begins = (torch.cumsum(counts, 0) - counts)[sequence]
    column = torch.arange(len(values), device=values.device) - begins
    padded = values.new_zeros(num_sequences, int(counts.max()) + 1)
    padded[sequence, column] = values
    for step in range(padded.shape[1] - 2, -1, -1):
        padded[:, step] += discount * padded[:, step + 1]
    return padded[sequence, column]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "gae": gae,
    "turn_gae": turn_gae,
}
