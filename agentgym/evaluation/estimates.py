"""Estimates of one evaluation: functions of arrays, one row per item and one column per sample; NaN
is an episode that does not count.

Every interval knows its clusters: all samples of an item, and all items of a family if families are
known. `clustered.py` explains how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation.clustered import (
    clustered_interval,
    clustered_intervals,
    family_codes,
    moments,
)
from agentgym.evaluation.passk import Interval, curves

FloatArray = NDArray[np.float64]
Families = Sequence[str | None]


def success(
    greedy: FloatArray, samples: FloatArray, families: Families | None = None, *, confidence: float
) -> dict[str, Interval | None]:
    """Return `greedy`, `avg_at_<n>`, and `pass_at_<k>` and `pass_hat_<k>` for every k up to n; None
    if no item has enough samples that count.

    greedy: [I], samples: [I, n]; 1, 0, or NaN. families: [I].
    An item with fewer than k samples that count has no estimate and is left out of pass@k and
    pass^k. `Interval.num_items` counts the rest.
    Errors: ValueError for any other value or shape.
    """
    rows = per_item(greedy, samples)
    values = np.stack(list(rows.values()))
    result: dict[str, Interval | None] = dict.fromkeys(rows)
    has_value: NDArray[np.bool_] = np.asarray(~np.isnan(values).all(axis=1))
    intervals = clustered_intervals(
        values[has_value], family_codes(families), kind="share", confidence=confidence
    )
    counts = (~np.isnan(values[has_value])).sum(axis=1)
    for name, mean, low, high, count in zip(
        [name for name, has in zip(rows, has_value, strict=True) if has],
        *intervals,
        counts,
        strict=True,
    ):
        result[name] = Interval(float(mean), float(low), float(high), int(count))
    return result


def per_item(greedy: FloatArray, samples: FloatArray) -> dict[str, FloatArray]:
    """Return the values of all items, [I], under the names of `success`; NaN for too few samples.
    Errors: as `success`.
    """
    if greedy.ndim != 1 or samples.ndim != 2 or len(greedy) != len(samples):
        raise ValueError(
            f"an evaluation is greedy [I] and samples [I, n], got {greedy.shape} and"
            f" {samples.shape}"
        )
    for name, values in (("greedy", greedy), ("samples", samples)):
        if not (np.isnan(values) | (values == 0) | (values == 1)).all():
            raise ValueError(f"{name} must hold success as 1 or 0, or NaN; pass success, not score")
    num_samples = samples.shape[1]
    n, c = (~np.isnan(samples)).sum(axis=1), np.nansum(samples, axis=1)
    at, hat = curves(n, c, num_samples)
    share = np.divide(c, n, out=np.full(len(n), np.nan), where=n > 0)
    return {
        "greedy": greedy,
        f"avg_at_{num_samples}": share,
        **{f"pass_at_{k + 1}": at[:, k] for k in range(num_samples)},
        **{f"pass_hat_{k + 1}": hat[:, k] for k in range(num_samples)},
    }


def mean_reward(
    rewards: FloatArray, families: Families | None = None, *, confidence: float
) -> Interval | None:
    """Return the mean over items of their mean reward, with its interval; None if nothing counts.
    rewards: [I, n].
    """
    values = item_means(rewards)
    if np.isnan(values).all():
        return None
    return clustered_interval(values, families, kind="number", confidence=confidence)


def ratio(
    part: FloatArray, whole: FloatArray, families: Families | None = None, *, confidence: float
) -> Interval | None:
    """Return the sum of `part` over the sum of `whole`, both [I], with its interval: for example
    invalid actions over actions, or turns of successes over successes. None if the whole is 0.
    Items with NaN in either are left out.

    The interval is that of the linearised ratio (Cochran 1977, section 6.4), clustered.
    """
    total = np.nansum(whole)
    if total <= 0:
        return None
    known = ~(np.isnan(part) | np.isnan(whole))
    value = float(part[known].sum() / whole[known].sum())
    off = np.where(known, (part - value * whole) / whole[known].mean(), np.nan)
    around = moments(off[None], family_codes(families), kind="number").interval(confidence)
    low, high = max(value + around.low, 0.0), value + around.high
    return Interval(value, low, high, int((whole[known] > 0).sum()))


def to_success(
    cost: FloatArray,
    samples: FloatArray,
    families: Families | None = None,
    *,
    confidence: float,
) -> dict[str, Any] | None:
    """Return the cost of the episodes that succeed, in turns or tokens: mean with interval, median,
    and their number. cost, samples: [I, n]. None if nothing succeeded or a cost is not known.
    """
    won = samples == 1
    if not won.any() or np.isnan(cost[won]).any():
        return None
    counted = won.sum(axis=1).astype(np.float64)
    spent = np.where(won, cost, 0.0).sum(axis=1)
    mean = ratio(spent, counted, families, confidence=confidence)
    assert mean is not None
    return {"mean": mean, "median": float(np.median(cost[won])), "num_episodes": int(won.sum())}


def by_family(
    samples: FloatArray, families: Families, *, confidence: float
) -> dict[str, dict[str, Any]]:
    """Return each family's number of items and success (None if nothing counts), by its name.
    Its items are the clusters. samples: [I, n]. Items without a family are left out.
    """
    values, family_of = item_means(samples), np.array(families, dtype=object)
    result = {}
    for family in sorted({family for family in families if family is not None}):
        family_values = values[family_of == family]
        known = not np.isnan(family_values).all()
        result[family] = {
            "num_items": len(family_values),
            "success": clustered_interval(family_values, kind="share", confidence=confidence)
            if known
            else None,
        }
    return result


def rate(count: float, wall_s: float) -> float | None:
    """Return episodes, turns or tokens per second; None if no time is known."""
    return count / wall_s if wall_s > 0 else None


def item_means(values: FloatArray) -> FloatArray:
    """Mean over the samples that count, [I]; NaN if none does. values: [I, n]."""
    count = (~np.isnan(values)).sum(axis=1)
    total = np.nansum(values, axis=1)
    return np.asarray(np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0))
