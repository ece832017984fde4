"""How sure a mean over a few seeds and many items is; `crossed_interval` is the only door.

A table `values [seeds, items]` has two sources of luck: which seeds trained, and which items were
asked.
All seeds answer the same items, so with S seeds and I items

    variance of the mean = (variance of the seeds' means) / S
                           + (covariance of two seeds over items) / I

The first part rests on S - 1 degrees of freedom, the second on about I - 1, and a bootstrap of
three seeds knows nothing of the first number: it covers 76 to 88 % where seeds matter.
Here the mean lies within t standard errors, t halfway between Satterthwaite's (up to 3 points short
where seeds matter most) and the two parts' own, weighted by variance (up to 2 points over: Cochran
and Cox).
A part that a few items make has fewer degrees of freedom: their kurtosis says how many.

Success near 0 or 1 is skewed: `kind="share"` turns the standard error into a number of independent
draws and takes the Wilson interval of as many.
Where fewer than `RARE` items tell anything, their covariance does not: there an item counts as one
draw.
`kind="difference"` has no such bound; where fewer than `RARE` items differ, two more are added to
them that differ, one each way (Bonett and Price 2012).
What this covers is simulated by `benchmarks/coverage.py`.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from agentgym.evaluation.passk import Interval

FloatArray = NDArray[np.float64]
Kind = Literal["share", "difference"]

RARE = 6  # items; with fewer a normal approximation is none


def crossed_interval(values: FloatArray, *, kind: Kind, confidence: float) -> Interval:
    """The mean of `values` [S, I] over seeds and items, with its interval; NaN is left out, every
    seed counts alike.

    kind: of a value: a share in 0 .. 1, or a difference of two in -1 .. 1.
    One seed alone speaks about items only.
    Errors: ValueError where a seed has no value.
    """
    if values.ndim != 2 or not values.size:
        raise ValueError(
            f"an interval over seeds needs values [seeds, items], got shape {values.shape}"
        )
    if np.isnan(values).all(axis=1).any():
        raise ValueError(
            "a seed has no valid episode; look at rollout/env_error_frac and the environment's log"
        )
    mean, low, high = (
        found.item() for found in crossed_intervals(values[None], kind=kind, confidence=confidence)
    )
    return Interval(mean, low, high, int((~np.isnan(values)).any(axis=0).sum()))


def crossed_intervals(
    values: FloatArray, *, kind: Kind, confidence: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(mean, low, high), each [...], of many tables at a time: values [..., S, I]."""
    per_seed = np.nanmean(values, axis=-1)
    mean = per_seed.mean(axis=-1)
    num_seeds = values.shape[-2]
    num_items = (~np.isnan(values)).any(axis=-2).sum(axis=-1)
    of_seeds = per_seed.var(axis=-1, ddof=1) / num_seeds if num_seeds > 1 else np.zeros_like(mean)
    of_items = np.maximum(_covariance(values, per_seed), 0.0) / num_items
    item_means = _item_means(values, mean)
    rare = telling(item_means - (0 if kind == "difference" else np.round(mean)[..., None])) < RARE
    if kind == "difference":
        floor = ((item_means**2).sum(axis=-1) + 2) / (num_items + 2) ** 2
        of_items = np.where(rare, np.maximum(of_items, floor - of_seeds), of_items)
    quantile = _quantile(of_seeds, of_items, num_seeds, _freedom(item_means, num_items), confidence)
    if kind == "difference":
        half = quantile * np.sqrt(of_seeds + of_items)
        return mean, np.maximum(mean - half, -1.0), np.minimum(mean + half, 1.0)
    low, high = score_bounds(mean, of_seeds + of_items, quantile, num_items, rare)
    return mean, low, high


def telling(off: FloatArray) -> FloatArray:
    """[...] How many items make a result what it is: k where k are off alike, fewer where one
    outweighs the others.

    off: [..., I] from what says nothing: 0 for a difference, the nearer end for a share.
    """
    size = np.abs(off)
    squares = (size**2).sum(axis=-1)
    return np.asarray(
        np.divide(size.sum(axis=-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)
    )


def _item_means(values: FloatArray, mean: FloatArray) -> FloatArray:
    """[..., I] over seeds; an item without a value stands at the mean of all."""
    valid = ~np.isnan(values)
    found = np.where(valid, values, 0.0).sum(axis=-2) / np.maximum(valid.sum(axis=-2), 1)
    return np.where(valid.any(axis=-2), found, mean[..., None])


def _covariance(values: FloatArray, per_seed: FloatArray) -> FloatArray:
    """[...] Of two seeds over the items both have, all pairs together; of one seed alone, its
    variance.
    """
    off = np.nan_to_num(values - per_seed[..., None], nan=0.0)
    squares = (off**2).sum(axis=(-2, -1))
    if values.shape[-2] == 1:
        num_values = (~np.isnan(values)).sum(axis=(-2, -1))
        return np.asarray(squares / np.maximum(num_values - 1, 1))
    both = ((off.sum(axis=-2) ** 2).sum(axis=-1) - squares) / 2  # each pair's products, over items
    has = (~np.isnan(values)).sum(axis=-2)
    num_pairs = math.comb(values.shape[-2], 2)
    return np.asarray(both / np.maximum((has * (has - 1) / 2).sum(axis=-1) - num_pairs, 1))


def _freedom(item_means: FloatArray, num_items: NDArray[np.int_]) -> FloatArray:
    """[...] Degrees of freedom of the items' variance: fewer, the more of it a few items make
    (their kurtosis, unbiased).
    """
    off = item_means - item_means.mean(axis=-1, keepdims=True)
    second, fourth = (off**2).mean(axis=-1), (off**4).mean(axis=-1)
    excess = np.divide(fourth, second**2, out=np.full_like(second, 3.0), where=second > 0) - 3
    n = np.maximum(num_items, 4)
    excess = np.maximum((n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * excess + 6), 0.0)
    return np.asarray(2 / (2 / np.maximum(num_items - 1, 1) + excess / num_items))


def _quantile(
    of_seeds: FloatArray, of_items: FloatArray, num_seeds: int, many: FloatArray, confidence: float
) -> FloatArray:
    """[...] How many standard errors; see the head of this module. many: degrees of freedom of
    the items' part.
    """
    level, few = (1 + confidence) / 2, max(num_seeds - 1, 1)
    share = np.divide(
        of_seeds, of_seeds + of_items, out=np.zeros_like(of_seeds), where=of_seeds > 0
    )
    freedom = 1 / (share**2 / few + (1 - share) ** 2 / many)
    weighted = share * student.ppf(level, few) + (1 - share) * student.ppf(level, many)
    result: FloatArray = (student.ppf(level, freedom) + weighted) / 2
    return result


def score_bounds(
    mean: FloatArray,
    variance: FloatArray,
    quantile: FloatArray,
    num_items: NDArray[np.int_],
    rare: NDArray[np.bool_],
) -> tuple[FloatArray, FloatArray]:
    """The score interval of as many draws as would have this variance. rare: of at most one an
    item.
    [...]
    """
    spread = mean * (1 - mean)
    draws = np.divide(
        spread, variance, out=num_items.astype(np.float64), where=(variance > 0) & (spread > 0)
    )
    draws = np.where(rare, np.minimum(draws, num_items), draws)
    turned = quantile**2 / draws
    centre = (mean + turned / 2) / (1 + turned)
    half = np.sqrt(turned * spread + turned**2 / 4) / (1 + turned)
    # at 0 and 1 the bound equals the mean in exact arithmetic; rounding must not put it on the
    # wrong side
    low, high = np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)
    exact = (variance == 0) & ~rare  # items that all say the same, and neither 0 nor 1
    return np.where(exact, mean, low), np.where(exact, mean, high)
