"""The numbers of a run's own evaluations, from their outcomes, by the estimates and intervals of
`estimates.py`: those of every evaluation.

Two conventions stand beside each other: slots that failed left out (`summary`), and taken for
failures of the policy. Where they differ much, neither is the truth: coverage says how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation import estimates
from agentgym.evaluation.clustered import clustered_interval
from agentgym.evaluation.estimates import Families
from agentgym.evaluation.passk import FAILED, Interval, as_failures, coverage

Array = NDArray[np.float64]
# greedy [I] and samples [I, n]: success as 1 or 0, NaN where the episode failed
Outcomes = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Asked:
    """Which numbers, and how sure."""

    k: Sequence[int]  # of pass@k
    confidence: float


def both_conventions(outcomes: Outcomes, families: Families, asked: Asked) -> dict[str, Any]:
    """`summary` leaves failed episodes out, `failed_as_failures` takes them for failures of the
    policy; `coverage` is the share of episodes that did not fail. JSON types.

    families: [I], of each item. Errors: ValueError where no item is left.
    """
    greedy, samples = outcomes
    found = {}
    for name, (one, other) in (
        ("summary", outcomes),
        (FAILED, (as_failures(greedy), as_failures(samples))),
    ):
        every = estimates.success(one, other, families, confidence=asked.confidence)
        found[name] = to_json({key: _told(every[key], key) for key in keys(samples, asked.k)})
    return {**found, "coverage": coverage(greedy, samples)}


def paired(
    before: Outcomes, after: Outcomes, families: Families, asked: Asked
) -> dict[str, Interval]:
    """Mean per-item difference after - before, by `keys`; row i of both is the same item.

    Narrower than comparing two intervals, because an item's difficulty cancels.
    An item that failed in either is left out.
    Errors: ValueError where none is left, or the two are of other items or samples.
    """
    shapes = [[values.shape for values in outcomes] for outcomes in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "paired evaluations need the same items and samples, got"
            f" {before[1].shape} and {after[1].shape}"
        )
    one, other = estimates.per_item(*before), estimates.per_item(*after)
    found = {}
    for key in keys(after[1], asked.k):
        gained = other[key] - one[key]
        if np.isnan(gained).all():
            raise ValueError(_missing(key))
        found[key] = clustered_interval(
            gained, families, kind="difference", confidence=asked.confidence
        )
    return found


def keys(samples: Array, k: Sequence[int]) -> list[str]:
    """Names of the numbers: `greedy`, `avg_at_<n>`, and `pass_at_<k>` for each k."""
    return ["greedy", f"avg_at_{samples.shape[1]}", *(f"pass_at_{each}" for each in k)]


def to_json(summary: dict[str, Interval]) -> dict[str, Any]:
    return {name: interval.to_json() for name, interval in summary.items()}


def _told(found: Interval | None, key: str) -> Interval:
    if found is None:
        raise ValueError(_missing(key))
    return found


def _missing(key: str) -> str:
    return (
        f"{key}: no item has enough valid episodes; look at rollout/env_error_frac and the"
        " environment's log"
    )
