"""Confidence intervals of success, and unbiased estimates of pass@k and pass^k.

`clustered_interval`: the mean over items. Items of a family (a level, a kind of task) succeed and
fail together, so the interval is made of the families' sums, not of the items. With G families of
n_g of the N items, and S_g the sum of a family's distances from the mean,

    variance of the mean = sum over g of S_g^2 / (1 - n_g / N), over N^2

which is unbiased if the items are independent after all (CR2: Bell and McCaffrey 2002).
Its degrees of freedom are Satterthwaite's: G - 1 if families are of one size, fewer if a large one
outweighs the others, and fewer if a few families make most of it (their kurtosis).
Without families every item is its own cluster, and this is the usual variance and t interval.

A share near 0 or 1 is skewed: it gets the Wilson interval of the number of independent draws that
has its standard error. With one episode per item this is Wilson's own interval.

`crossed_interval`: the mean of a table [seeds, items] over training seeds and items. All seeds
answer the same items, so with S seeds and I items

    variance of the mean = (variance of the seeds' means) / S
                           + (covariance of two seeds over items) / I

The first part has S - 1 degrees of freedom, the second about I - 1. A bootstrap of three seeds
cannot estimate the first part: it covers 76 to 88 % if seeds matter.
Here the interval is t standard errors wide on each side, with t halfway between Satterthwaite's
(which covers up to 3 points too little if seeds matter most) and the two parts' own, weighted by
variance (Cochran and Cox; up to 2 points too much).
It is never narrower than the one over items alone, and with fewer than FEWEST_SEEDS seeds it is
that one: if two seeds agree, other seeds may still differ.

If fewer than RARE items decide a share, their covariance is unreliable: then an item counts as one
draw. If fewer than RARE items differ, a difference gets two more that differ, one each way (Bonett
and Price 2012).
`benchmarks/intervals.py` simulates the coverage of both intervals and of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit  # scipy.stats checks more and is 50 times slower

FloatArray = NDArray[np.float64]
# a share in 0 .. 1, a difference of two shares in -1 .. 1, or any number
Kind = Literal["share", "difference", "number"]
SuccessKind = Literal["share", "difference"]
FAILED = "failed_as_failures"  # name of the numbers that count failed slots as failures
FEWEST = 5  # families that can be clusters; fewer cannot represent other families
FEWEST_SEEDS = 3  # with fewer, the spread of seeds cannot be estimated
RARE = 6  # items; with fewer, the normal approximation fails


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


@dataclass(frozen=True, slots=True)
class Moments:
    """Means of rows of values [..., I], with their variances; every field is [...]."""

    mean: FloatArray
    variance: FloatArray  # of the mean
    freedom: FloatArray  # degrees of freedom of that variance
    num_items: NDArray[np.int_]

    def interval(
        self, confidence: float, lower: float = -np.inf, upper: float = np.inf
    ) -> Interval:
        """Return Student's interval of a single mean, clipped to lower .. upper."""
        quantile = stdtrit(self.freedom.item(), (1 + confidence) / 2)
        mean, half = self.mean.item(), float(quantile * np.sqrt(self.variance.item()))
        low, high = max(mean - half, lower), min(mean + half, upper)
        return Interval(mean, low, high, int(self.num_items.item()))

    def p_value(self) -> FloatArray:
        """Return the p-value of the two-sided t test that the mean is 0, [...].
        Without any variance it is 1 for a mean of 0, and 0 for another mean.
        """
        error, exact = np.sqrt(self.variance), np.where(self.mean == 0, 0.0, np.inf)
        score = np.divide(np.abs(self.mean), error, out=exact, where=error > 0)
        return np.asarray(2 * stdtr(self.freedom, -score))


def clustered_interval(
    values: FloatArray, families: Sequence[Hashable] | None = None, *, kind: Kind, confidence: float
) -> Interval:
    """Return the mean of `values` [I] with its interval; NaN is left out. kind: see `Kind`.
    families: [I] family of each item; they are the clusters if there are FEWEST or more, else every
    item is its own. Errors: ValueError if no value is left, or for another shape.
    """
    if values.ndim != 1 or np.isnan(values).all():
        raise ValueError(
            f"an interval needs a value of at least one item, got {values.shape}, all missing; look"
            " at the evaluation's outcomes"
        )
    codes = family_codes(families)
    mean, low, high = clustered_intervals(values[None], codes, kind=kind, confidence=confidence)
    return Interval(mean.item(), low.item(), high.item(), int((~np.isnan(values)).sum()))


def clustered_intervals(
    values: FloatArray, codes: NDArray[np.int_] | None = None, *, kind: Kind, confidence: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (mean, low, high) of each row, [...]. values: [..., I]; codes: as for `moments`."""
    estimate = moments(values, codes, kind=kind)
    mean, quantile = estimate.mean, stdtrit(estimate.freedom, (1 + confidence) / 2)
    if kind == "share":
        rare, variance = _rare(values, mean, kind), estimate.variance
        if codes is None:  # a proportion: its variance is known from the mean
            one_draw = ((values == 0) | (values == 1) | np.isnan(values)).all(axis=-1)
            spread = mean * (1 - mean) / estimate.num_items
            variance = np.where(one_draw, spread, variance)
            quantile = np.where(one_draw, ndtri((1 + confidence) / 2), quantile)
        return mean, *score_bounds(mean, variance, quantile, estimate.num_items, rare)
    half = quantile * np.sqrt(estimate.variance)
    low, high = mean - half, mean + half
    if kind == "difference":
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    return mean, low, high


def moments(values: FloatArray, codes: NDArray[np.int_] | None = None, *, kind: Kind) -> Moments:
    """Return the moments of the mean of each row of `values` [..., I]; NaN is left out.
    kind: if fewer than RARE items decide a difference, its variance is raised, see the module.
    codes: [I], integers from 0, equal for items of one family; None: every item is its own cluster.
    """
    valid = ~np.isnan(values)
    count = valid.sum(axis=-1)
    mean = np.where(valid, values, 0.0).sum(axis=-1) / count
    off = np.where(valid, values - mean[..., None], 0.0)
    sizes = valid.astype(np.float64)
    if codes is not None:
        of_family = np.eye(int(codes.max()) + 1)[codes]
        off, sizes = off @ of_family, sizes @ of_family
    total, ones = count[..., None], np.ones_like(sizes)
    scale = np.divide(total, total - sizes, out=ones, where=(total > sizes) & (sizes > 0))
    parts = scale * off**2
    variance = parts.sum(axis=-1) / count**2
    if kind == "difference":  # add two items that differ, one each way (Bonett and Price 2012)
        floor = (np.where(valid, values, 0.0) ** 2).sum(axis=-1) + 2
        rare = _rare(values, mean, kind)
        variance = np.where(rare, np.maximum(variance, floor / (count + 2) ** 2), variance)
    return Moments(mean, variance, _freedom(parts, sizes, count, scale), count)


def family_codes(families: Sequence[Hashable] | None) -> NDArray[np.int_] | None:
    """Return each item's family number from 0, [I]; None for None or fewer than FEWEST families."""
    if families is None:
        return None
    code_of = {family: code for code, family in enumerate(dict.fromkeys(families))}
    return np.array([code_of[family] for family in families]) if len(code_of) >= FEWEST else None


def _freedom(
    parts: FloatArray, sizes: FloatArray, count: NDArray[np.int_], scale: FloatArray
) -> FloatArray:
    """Satterthwaite's degrees of freedom, reduced by the clusters' kurtosis, [...].
    parts: [..., G] terms of the variance; sizes: items per cluster; scale: their CR2 factors.
    """
    squares = sizes**2
    spread = (
        squares.sum(axis=-1)
        + ((scale * squares).sum(axis=-1) ** 2 - (scale**2 * squares**2).sum(axis=-1))
        / np.maximum(count, 1) ** 2
    )
    freedom = np.maximum(count**2 / spread, 1.0)
    num = np.maximum((sizes > 0).sum(axis=-1), 4)
    second, fourth = parts.sum(axis=-1) / num, (parts**2).sum(axis=-1) / num
    excess = _kurtosis(second, fourth, num)
    return np.asarray(np.maximum(2 / (2 / freedom + excess / num), 1.0))


def _kurtosis(second: FloatArray, fourth: FloatArray, n: NDArray[np.int_]) -> FloatArray:
    """Bias-corrected excess kurtosis (G2) of n >= 4 values, negative ones raised to 0, [...].
    second, fourth: central moments, means over n.
    """
    excess = np.divide(fourth, second**2, out=np.full_like(second, 3.0), where=second > 0) - 3
    return np.asarray(np.maximum((n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * excess + 6), 0.0))


def _rare(values: FloatArray, mean: FloatArray, kind: Kind) -> NDArray[np.bool_]:
    """Mask of the means that fewer than RARE items decide, too few for a normal mean, [...]."""
    end = 0.0 if kind == "difference" else np.round(mean)[..., None]
    return np.asarray(telling(np.nan_to_num(values - end, nan=0.0)) < RARE)


def telling(off: FloatArray) -> FloatArray:
    """Return the effective number of items that decide a mean, [...]: k if k items have the same
    distance and the rest have 0, fewer if one outweighs the others.
    off: [..., I] distance of each value from 0, or for a share from the nearer of 0 and 1.
    """
    size = np.abs(off)
    total, squares = size.sum(axis=-1), (size**2).sum(axis=-1)
    none = np.zeros_like(squares)
    return np.asarray(np.divide(total**2, squares, out=none, where=squares > 0))


def score_bounds(
    mean: FloatArray,
    variance: FloatArray,
    quantile: FloatArray,
    num_items: NDArray[np.int_],
    rare: NDArray[np.bool_],
) -> tuple[FloatArray, FloatArray]:
    """Return (low, high) of Wilson's score interval of shares, for the number of independent draws
    that would have this variance. All arguments and results are [...].
    quantile: half width in standard errors; rare: mask of means with at most one draw per item.
    Without variance the interval is the mean itself, unless `rare`.
    """
    spread, draws = mean * (1 - mean), num_items.astype(np.float64)
    np.divide(spread, variance, out=draws, where=(variance > 0) & (spread > 0))
    draws = np.where(rare, np.minimum(draws, num_items), draws)
    turned = quantile**2 / draws
    centre = (mean + turned / 2) / (1 + turned)
    half = np.sqrt(turned * spread + turned**2 / 4) / (1 + turned)
    # at 0 and 1 the bound equals the mean in exact arithmetic; rounding must not put it on the
    # wrong side
    low, high = np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)
    exact = (variance == 0) & ~rare  # equal items, neither 0 nor 1: the interval is a point
    return np.where(exact, mean, low), np.where(exact, mean, high)


def crossed_interval(
    values: FloatArray,
    *,
    kind: SuccessKind,
    confidence: float,
    codes: NDArray[np.int_] | None = None,
) -> Interval:
    """Return the mean of `values` [S, I] over seeds and items, with its interval; NaN is left out.
    codes: [I] the items' families, from `family_codes`.
    Errors: ValueError for another shape, or if a seed has no value.
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
    kind: SuccessKind,
    confidence: float,
    codes: NDArray[np.int_] | None = None,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return `crossed_interval`'s (mean, low, high), each [...], for tables values [..., S, I]."""
    mean = np.nanmean(values, axis=-1).mean(axis=-1)
    low, high = _over_items(values, mean, kind, confidence, codes)
    if values.shape[-2] < FEWEST_SEEDS:
        return mean, low, high
    wider = _over_both(values, mean, kind, confidence)
    return mean, np.minimum(low, wider[0]), np.maximum(high, wider[1])


def _over_items(
    values: FloatArray,
    mean: FloatArray,
    kind: SuccessKind,
    confidence: float,
    codes: NDArray[np.int_] | None,
) -> tuple[FloatArray, FloatArray]:
    """Return (low, high) of an interval that covers these seeds' mean on other items.
    If some seeds lack an item, it gets the other seeds' mean deviation from their own means.
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
    values: FloatArray, mean: FloatArray, kind: SuccessKind, confidence: float
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
    freedom = _freedom_of_items(item_means, num_items)
    quantile = _quantile(of_seeds, of_items, num_seeds, freedom, confidence)
    if kind == "difference":
        half = quantile * np.sqrt(of_seeds + of_items)
        return np.maximum(mean - half, -1.0), np.minimum(mean + half, 1.0)
    return score_bounds(mean, of_seeds + of_items, quantile, num_items, rare)


def _item_means(values: FloatArray, mean: FloatArray) -> FloatArray:
    """Mean of each item over seeds, [..., I]; an item without a value gets the overall mean."""
    valid = ~np.isnan(values)
    item_means = np.where(valid, values, 0.0).sum(axis=-2) / np.maximum(valid.sum(axis=-2), 1)
    return np.where(valid.any(axis=-2), item_means, mean[..., None])


def _covariance(values: FloatArray, per_seed: FloatArray) -> FloatArray:
    """Mean covariance of two seeds, [...]: over all pairs of seeds and the items that both have."""
    off = np.nan_to_num(values - per_seed[..., None], nan=0.0)
    squares = (off**2).sum(axis=(-2, -1))
    both = ((off.sum(axis=-2) ** 2).sum(axis=-1) - squares) / 2  # each pair's products, over items
    has = (~np.isnan(values)).sum(axis=-2)
    num_pairs = math.comb(values.shape[-2], 2)
    return np.asarray(both / np.maximum((has * (has - 1) / 2).sum(axis=-1) - num_pairs, 1))


def _freedom_of_items(item_means: FloatArray, num_items: NDArray[np.int_]) -> FloatArray:
    """Degrees of freedom of the items' variance, [...], reduced by the items' kurtosis."""
    off = item_means - item_means.mean(axis=-1, keepdims=True)
    second, fourth = (off**2).mean(axis=-1), (off**4).mean(axis=-1)
    excess = _kurtosis(second, fourth, np.maximum(num_items, 4))
    return np.asarray(2 / (2 / np.maximum(num_items - 1, 1) + excess / num_items))


def _quantile(
    of_seeds: FloatArray, of_items: FloatArray, num_seeds: int, many: FloatArray, confidence: float
) -> FloatArray:
    """Half width of the interval in standard errors, [...].
    of_seeds, of_items: the variance's two parts; many: degrees of freedom of the items' part.
    """
    level, few, none = (1 + confidence) / 2, num_seeds - 1, np.zeros_like(of_seeds)
    share = np.divide(of_seeds, of_seeds + of_items, out=none, where=of_seeds > 0)
    freedom = 1 / (share**2 / few + (1 - share) ** 2 / many)
    weighted = share * stdtrit(few, level) + (1 - share) * stdtrit(many, level)
    result: FloatArray = (stdtrit(freedom, level) + weighted) / 2
    return result
