"""What an evaluation says and how sure it is: success of the greedy policy, of samples, and of the
best of k samples.

| number | estimate | interval | |---|---|---| | `greedy` | share of items solved by the one greedy
episode | Wilson score: right for a proportion, also near 0 and 1 | | `avg_at_<n>` | mean over items
of the share of its samples that succeed | percentile bootstrap over items | | `pass_at_<k>` | mean
over items of the unbiased pass@k | percentile bootstrap over items | | paired difference, any key |
mean over items of `b - a` | percentile bootstrap over items |

Items are resampled, never single samples: samples of one item are not independent.
The bootstrap speaks about the items, with each item's samples as they fell.
Where all items score alike it has no width; there only Wilson is informative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
FAILED = "failed_as_failures"  # the second convention, among results and metrics
# greedy [I] and samples [I, n]: success as 1 or 0, NaN where the environment failed
Outcomes = tuple[FloatArray, FloatArray]

_CHUNK_DRAWS = 2_000_000  # indices drawn at a time by the bootstrap, 16 MB


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval."""

    mean: float
    low: float
    high: float
    num_items: int  # items the estimate rests on; fewer than evaluated where environments failed

    def to_json(self) -> dict[str, float | int]:
        """Plain JSON types; `Interval(**row)` gives an equal object back."""
        return asdict(self)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> FloatArray:
    """Unbiased estimate that at least one of k samples succeeds, 1 - C(n - c, k) / C(n, k).

    n: samples per item; c: how many of them succeeded.
    They broadcast; the result has their shape.
    Errors: ValueError where n < k (undefined), k < 1, or c is outside 0 .. n.
    Source: arXiv:2107.03374, section 2.1.
    """
    total, successes = np.broadcast_arrays(
        np.asarray(n, dtype=np.float64), np.asarray(c, dtype=np.float64)
    )
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    if (total < k).any():
        raise ValueError(
            f"pass@{k} needs at least {k} samples per item, got {int(total.min())}; sample more or"
            " lower k"
        )
    if (successes < 0).any() or (successes > total).any():
        raise ValueError("pass@k needs 0 <= successes <= samples for every item")
    at_least_one = curves(total.ravel(), successes.ravel(), k)[0][:, -1]
    return np.asarray(at_least_one.reshape(total.shape))


def curves(n: FloatArray, c: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """(pass@k, pass^k) for k = 1 .. most, each [I, most]: that at least one of k samples
    succeeds, 1 - C(n - c, k) / C(n, k), and that all of them do, C(c, k) / C(n, k).

    n, c: [I] samples of an item and how many of them succeeded.
    Unbiased; NaN where an item has fewer than k samples: there is no estimate.
    Source: arXiv:2107.03374, section 2.1; arXiv:2406.12045, section 5.1.
    """
    drawn = np.arange(most)
    left = (n[:, None] - drawn).astype(np.float64)
    left[left <= 0] = np.nan
    none = np.cumprod(np.maximum(n[:, None] - c[:, None] - drawn, 0.0) / left, axis=1)
    every = np.cumprod(np.maximum(c[:, None] - drawn, 0.0) / left, axis=1)
    return np.asarray(1.0 - none, dtype=np.float64), np.asarray(every, dtype=np.float64)


def bootstrap_interval(
    values: FloatArray, *, confidence: float, num_bootstrap: int, seed: int
) -> Interval:
    """Percentile bootstrap of the mean. values: [I], finite, one per item; whole items are
    drawn with replacement.
    """
    num_items = len(values)
    if num_items == 0 or not np.isfinite(values).all():
        raise ValueError(
            f"a bootstrap needs finite values of at least one item, got {num_items} values; drop"
            " failed items first"
        )
    generator = np.random.Generator(np.random.Philox(seed))
    means = np.empty(num_bootstrap)
    chunk = max(1, _CHUNK_DRAWS // num_items)
    for start in range(0, num_bootstrap, chunk):
        drawn = generator.integers(num_items, size=(min(chunk, num_bootstrap - start), num_items))
        means[start : start + len(drawn)] = values[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(values.mean()), float(low), float(high), num_items)


def wilson_interval(successes: int, n: int, confidence: float) -> Interval:
    """Wilson score interval of a proportion. Source: Wilson 1927, without continuity correction."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(
            f"a proportion needs 0 <= successes <= n and n >= 1, got {successes} of {n}"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at 0 and n the bound equals p in exact arithmetic; rounding must not put it on the wrong side
    return Interval(
        p, float(min(max(centre - half, 0.0), p)), float(max(min(centre + half, 1.0), p)), n
    )


def summarise(
    greedy: FloatArray,
    samples: FloatArray,
    *,
    k: Sequence[int],
    confidence: float,
    num_bootstrap: int,
    seed: int,
) -> dict[str, Interval]:
    """The numbers of one evaluation: `greedy`, `avg_at_<n>`, and `pass_at_<k>` for each k.

    greedy: [I], samples: [I, n]; 1, 0, or NaN for an episode whose environment failed.
    A failed episode leaves its item's n and is never a 0; an item with fewer valid samples than k
    leaves pass@k.
    `Interval.num_items` and `num_failed` say how many are out.
    Errors: ValueError for other values, or where no item is left.
    """
    summary: dict[str, Interval] = {}
    for key, values in per_item(greedy, samples, k).items():
        valid = _valid(values, key)
        if key == "greedy":
            summary[key] = wilson_interval(int(valid.sum()), len(valid), confidence)
        else:
            summary[key] = bootstrap_interval(
                valid, confidence=confidence, num_bootstrap=num_bootstrap, seed=seed
            )
    return summary


def paired_differences(
    a: Outcomes, b: Outcomes, *, k: Sequence[int], confidence: float, num_bootstrap: int, seed: int
) -> dict[str, Interval]:
    """Mean per-item difference b - a under the keys of `summarise`; row i of both is the same item.

    Narrower than comparing two intervals, because an item's difficulty cancels.
    An item that failed in either is left out.
    """
    if [values.shape for values in a] != [values.shape for values in b]:
        raise ValueError(
            f"paired evaluations need the same items and samples, got {a[1].shape} and {b[1].shape}"
        )
    before, after = per_item(*a, k), per_item(*b, k)
    differences = {key: _valid(after[key] - before[key], key) for key in before}
    return {
        key: bootstrap_interval(
            values, confidence=confidence, num_bootstrap=num_bootstrap, seed=seed
        )
        for key, values in differences.items()
    }


def as_failures(outcomes: FloatArray) -> FloatArray:
    """The other convention: an episode that failed is one that did not succeed."""
    return np.nan_to_num(outcomes, nan=0.0)


def coverage(greedy: FloatArray, samples: FloatArray) -> float:
    """Share of the episodes that count."""
    return 1.0 - num_failed(greedy, samples) / (greedy.size + samples.size)


def num_failed(greedy: FloatArray, samples: FloatArray) -> int:
    """Episodes left out because their environment failed."""
    return int(np.isnan(greedy).sum() + np.isnan(samples).sum())


def per_item(greedy: FloatArray, samples: FloatArray, k: Sequence[int]) -> dict[str, FloatArray]:
    """One value per item and key, [I]; NaN where the item has too few valid episodes."""
    if greedy.ndim != 1 or samples.ndim != 2 or len(greedy) != len(samples):
        raise ValueError(
            f"an evaluation is greedy [I] and samples [I, n], got {greedy.shape} and"
            f" {samples.shape}"
        )
    for name, values in (("greedy", greedy), ("samples", samples)):
        if not (np.isnan(values) | (values == 0) | (values == 1)).all():
            raise ValueError(
                f"{name} must hold success as 1 or 0, or NaN for a failed environment; pass"
                " success, not the score"
            )
    n = (~np.isnan(samples)).sum(axis=1)
    c = np.nansum(samples, axis=1)
    result = {
        "greedy": greedy.astype(np.float64),
        f"avg_at_{samples.shape[1]}": np.where(n > 0, c / np.maximum(n, 1), np.nan),
    }
    for each in k:
        enough = n >= each
        values = np.full(len(n), np.nan)
        values[enough] = pass_at_k(n[enough], c[enough], each)
        result[f"pass_at_{each}"] = values
    return result


def _valid(values: FloatArray, key: str) -> FloatArray:
    valid: FloatArray = values[~np.isnan(values)]
    if len(valid) == 0:
        raise ValueError(
            f"{key}: no item has enough valid episodes; look at rollout/env_error_frac and the"
            " environment's log"
        )
    return valid
