"""Confidence interval of a mean over a few seeds and many items: `crossed_interval`.

A table `values [seeds, items]` has two sources of randomness: the training seeds and the items of
the evaluation.
All seeds answer the same items, so with S seeds and I items

    variance of the mean = (variance of the seeds' means) / S
                           + (covariance of two seeds over items) / I

The first part has S - 1 degrees of freedom, the second about I - 1. A bootstrap of three seeds
cannot estimate the first part: it covers 76 to 88 % if seeds matter.
Here the interval is t standard errors wide on each side, with t halfway between Satterthwaite's (up
to 3 points short if seeds matter most) and the two parts' own, weighted by variance (up to 2 points
over: Cochran and Cox).
A part that a few items make has fewer degrees of freedom, by their kurtosis.

The interval is never narrower than the one over items alone (`clustered.clustered_intervals` of
each item's mean over the seeds), and with fewer than FEWEST_SEEDS seeds it is that one: seeds that
happen to agree say nothing about other seeds.

Success near 0 or 1 is skewed: `kind="share"` turns the standard error into a number of independent
draws and takes the Wilson interval of that many draws.
If fewer than `RARE` items decide the result, their covariance is unreliable: then an item counts as
one draw.
`kind="difference"` has no such bound; if fewer than `RARE` items differ, two more are added that
differ, one each way (Bonett and Price 2012).
`benchmarks/intervals.py` simulates the coverage.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from agentgym.evaluation.clustered import RARE, clustered_intervals, score_bounds, telling
from agentgym.evaluation.passk import Interval

FloatArray = NDArray[np.float64]
Kind = Literal["share", "difference"]

FEWEST_SEEDS = 3  # with fewer, how much seeds differ is not known


def crossed_interval(
    values: FloatArray,
    *,
    kind: Kind,
    confidence: float,
    codes: NDArray[np.int_] | None = None,
) -> Interval:
    """Return the mean of `values` [S, I] over seeds and items, with its interval.

    NaN is left out, every seed counts alike.
    kind: of a value: a share in 0 .. 1, or a difference of two in -1 .. 1.
    codes: [I] the items' families, from `clustered.family_codes`.
    With fewer than FEWEST_SEEDS seeds, the interval is over items only.
    Errors: ValueError if a seed has no value.
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
        bound.item()
        for bound in crossed_intervals(values[None], kind=kind, confidence=confidence, codes=codes)
    )
    return Interval(mean, low, high, int((~np.isnan(values)).any(axis=0).sum()))


def crossed_intervals(
    values: FloatArray,
    *,
    kind: Kind,
    confidence: float,
    codes: NDArray[np.int_] | None = None,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (mean, low, high), each [...], of many tables at a time: values [..., S, I]."""
    mean = np.nanmean(values, axis=-1).mean(axis=-1)
    low, high = _over_items(values, mean, kind, confidence, codes)
    if values.shape[-2] < FEWEST_SEEDS:
        return mean, low, high
    wider = _over_both(values, mean, kind, confidence)
    return mean, np.minimum(low, wider[0]), np.maximum(high, wider[1])


def _over_items(
    values: FloatArray,
    mean: FloatArray,
    kind: Kind,
    confidence: float,
    codes: NDArray[np.int_] | None,
) -> tuple[FloatArray, FloatArray]:
    """Return (low, high) of an interval that covers these seeds' mean on other items.

    For an item that some seeds lack, the mean deviation of the other seeds is used; the interval is
    then shifted to the mean.
    """
    count = (~np.isnan(values)).sum(axis=-2)
    off = np.nan_to_num(values - np.nanmean(values, axis=-1, keepdims=True), nan=0.0).sum(axis=-2)
    some = np.divide(off, count, out=np.full(count.shape, np.nan), where=count > 0)
    whole = count == values.shape[-2]
    items = np.where(whole, values.mean(axis=-2), mean[..., None] + some)
    centre, low, high = clustered_intervals(items, codes, kind=kind, confidence=confidence)
    least = 0.0 if kind == "share" else -1.0
    return np.maximum(mean - (centre - low), least), np.minimum(mean + (high - centre), 1.0)


def _over_both(
    values: FloatArray, mean: FloatArray, kind: Kind, confidence: float
) -> tuple[FloatArray, FloatArray]:
    """Return (low, high) of an interval that covers the mean of other seeds on other items."""
    per_seed = np.nanmean(values, axis=-1)
    num_seeds = values.shape[-2]
    num_items = (~np.isnan(values)).any(axis=-2).sum(axis=-1)
    of_seeds = per_seed.var(axis=-1, ddof=1) / num_seeds
    of_items = np.maximum(_covariance(values, per_seed), 0.0) / num_items
    item_means = _item_means(values, mean)
    rare = telling(item_means - (0 if kind == "difference" else np.round(mean)[..., None])) < RARE
    if kind == "difference":
        floor = ((item_means**2).sum(axis=-1) + 2) / (num_items + 2) ** 2
        of_items = np.where(rare, np.maximum(of_items, floor - of_seeds), of_items)
    quantile = _quantile(of_seeds, of_items, num_seeds, _freedom(item_means, num_items), confidence)
    if kind == "difference":
        half = quantile * np.sqrt(of_seeds + of_items)
        return np.maximum(mean - half, -1.0), np.minimum(mean + half, 1.0)
    return score_bounds(mean, of_seeds + of_items, quantile, num_items, rare)


def _item_means(values: FloatArray, mean: FloatArray) -> FloatArray:
    """Mean over seeds, [..., I]; an item without a value gets the overall mean."""
    valid = ~np.isnan(values)
    item_means = np.where(valid, values, 0.0).sum(axis=-2) / np.maximum(valid.sum(axis=-2), 1)
    return np.where(valid.any(axis=-2), item_means, mean[..., None])


def _covariance(values: FloatArray, per_seed: FloatArray) -> FloatArray:
    """Mean covariance over all pairs of seeds, over the items both have, [...]."""
    off = np.nan_to_num(values - per_seed[..., None], nan=0.0)
    squares = (off**2).sum(axis=(-2, -1))
    both = ((off.sum(axis=-2) ** 2).sum(axis=-1) - squares) / 2  # each pair's products, over items
    has = (~np.isnan(values)).sum(axis=-2)
    num_pairs = math.comb(values.shape[-2], 2)
    return np.asarray(both / np.maximum((has * (has - 1) / 2).sum(axis=-1) - num_pairs, 1))


def _freedom(item_means: FloatArray, num_items: NDArray[np.int_]) -> FloatArray:
    """Degrees of freedom of the items' variance, [...], reduced by the items' kurtosis (unbiased):
    they are fewer if a few items make most of the variance.
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
    """Number of standard errors, [...]; see the module's docstring. many: degrees of freedom of the
    items' part.
    """
    level, few = (1 + confidence) / 2, num_seeds - 1
    share = np.divide(
        of_seeds, of_seeds + of_items, out=np.zeros_like(of_seeds), where=of_seeds > 0
    )
    freedom = 1 / (share**2 / few + (1 - share) ** 2 / many)
    weighted = share * student.ppf(level, few) + (1 - share) * student.ppf(level, many)
    result: FloatArray = (student.ppf(level, freedom) + weighted) / 2
    return result
