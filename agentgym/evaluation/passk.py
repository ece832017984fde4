"""Exact estimates of an evaluation's success: pass@k and pass^k of samples, Wilson's interval of a
proportion. `clustered.py` has the interval of a mean over items.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
FAILED = "failed_as_failures"  # the second convention, among results and metrics


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval."""

    mean: float
    low: float
    high: float
    num_items: int  # items the estimate rests on; fewer than evaluated if environments failed

    def to_json(self) -> dict[str, float | int]:
        """Return plain JSON types; `Interval(**row)` gives an equal object back."""
        return asdict(self)


def curves(n: FloatArray, c: FloatArray, max_k: int) -> tuple[FloatArray, FloatArray]:
    """Return (pass@k, pass^k) for k = 1 .. max_k, each [I, max_k].

    pass@k: at least one of k samples succeeds, 1 - C(n - c, k) / C(n, k); pass^k: all of them
    succeed, C(c, k) / C(n, k).
    n, c: [I] samples of an item and how many of them succeeded.
    Unbiased; NaN if an item has fewer than k samples: there is no estimate.
    Source: arXiv:2107.03374, section 2.1; arXiv:2406.12045, section 5.1.
    """
    drawn = np.arange(max_k)
    left = (n[:, None] - drawn).astype(np.float64)
    left[left <= 0] = np.nan
    none = np.cumprod(np.maximum(n[:, None] - c[:, None] - drawn, 0.0) / left, axis=1)
    every = np.cumprod(np.maximum(c[:, None] - drawn, 0.0) / left, axis=1)
    return np.asarray(1.0 - none, dtype=np.float64), np.asarray(every, dtype=np.float64)


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
