"""An evaluation's estimates from its outcomes, of whatever policy and whoever played.

Two conventions stand beside each other: slots that failed left out (`summary`), and taken for
failures of the policy. Where they differ much, neither is the truth: coverage says how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation.passk import (
    FAILED,
    Interval,
    as_failures,
    coverage,
    summarise,
)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Asked:
    """How sure intervals are, and how they are drawn."""

    confidence: float
    num_bootstrap: int
    seed: int


def both_conventions(
    greedy: Array, samples: Array, k: Sequence[int], asked: Asked
) -> dict[str, Any]:
    """`summary` leaves failed episodes out, `failed_as_failures` takes them for failures of the
    policy; `coverage` is the share of episodes that did not fail. JSON types.
    """
    return {
        "summary": intervals(greedy, samples, k, asked),
        FAILED: intervals(as_failures(greedy), as_failures(samples), k, asked),
        "coverage": coverage(greedy, samples),
    }


def intervals(greedy: Array, samples: Array, k: Sequence[int], asked: Asked) -> dict[str, Any]:
    """The estimates of `passk.summarise`, as JSON types."""
    found = summarise(
        greedy,
        samples,
        k=k,
        confidence=asked.confidence,
        num_bootstrap=asked.num_bootstrap,
        seed=asked.seed,
    )
    return to_json(found)


def to_json(summary: dict[str, Interval]) -> dict[str, Any]:
    return {name: interval.to_json() for name, interval in summary.items()}
