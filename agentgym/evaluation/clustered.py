"""Confidence interval of a mean over items, independent or in families: `clustered_interval`.

Items of a family (a level, a kind of task) succeed and fail together, so the interval is made of
the families' sums, not of the items. With G families of n_g of the N items, and S_g the sum of a
family's distances from the mean,

    variance of the mean = sum over g of S_g^2 / (1 - n_g / N), over N^2

which is unbiased if the items are independent after all (CR2: Bell and McCaffrey 2002).
Its degrees of freedom are Satterthwaite's: G - 1 if families are of one size, fewer if a large one
outweighs the others, and fewer if a few families make most of it (their kurtosis).
Without families every item is its own cluster, and this is the usual variance and t interval.

A share near 0 or 1 is skewed: it gets the Wilson interval of the number of independent draws that
has its standard error. With one episode per item this is Wilson's own interval.
`seeds.crossed_interval` does the same for several seeds.
`benchmarks/intervals.py` simulates the coverage of this interval and of the bootstrap.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit  # scipy.stats checks more and is 50 times slower

from agentgym.evaluation.passk import Interval

FloatArray = NDArray[np.float64]
# a share in 0 .. 1, a difference of two shares in -1 .. 1, or any number
Kind = Literal["share", "difference", "number"]
# fewest families that can be clusters; with fewer, the interval does not cover other families,
# only other items of these
FEWEST = 5
RARE = 6  # items; with fewer, the normal approximation fails


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean of one row of values or of many rows, with its variance; every field is [...]."""

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
        error = np.sqrt(self.variance)
        score = np.divide(
            np.abs(self.mean), error, out=np.where(self.mean == 0, 0.0, np.inf), where=error > 0
        )
        return np.asarray(2 * stdtr(self.freedom, -score))


def clustered_interval(
    values: FloatArray,
    families: Sequence[Hashable] | None = None,
    *,
    kind: Kind,
    confidence: float,
) -> Interval:
    """Return the mean of `values` [I] with its interval; NaN is left out.

    families: [I] family of each item; they are the clusters if there are FEWEST or more.
    Errors: ValueError if no value is left.
    """
    if values.ndim != 1 or np.isnan(values).all():
        raise ValueError(
            f"an interval needs a value of at least one item, got {values.shape}, all missing; look"
            " at the evaluation's outcomes"
        )
    mean, low, high = clustered_intervals(
        values[None], family_codes(families), kind=kind, confidence=confidence
    )
    return Interval(mean.item(), low.item(), high.item(), int((~np.isnan(values)).sum()))


def clustered_intervals(
    values: FloatArray, codes: NDArray[np.int_] | None = None, *, kind: Kind, confidence: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (mean, low, high) of each row, [...]. values: [..., I]; codes: as for `moments`."""
    estimate = moments(values, codes, kind=kind)
    quantile = stdtrit(estimate.freedom, (1 + confidence) / 2)
    if kind == "share":
        rare, variance = _rare(values, estimate.mean, kind), estimate.variance
        if codes is None:  # a proportion: its variance is known from the mean
            one_draw = ((values == 0) | (values == 1) | np.isnan(values)).all(axis=-1)
            spread = estimate.mean * (1 - estimate.mean) / estimate.num_items
            variance = np.where(one_draw, spread, variance)
            quantile = np.where(one_draw, ndtri((1 + confidence) / 2), quantile)
        return estimate.mean, *score_bounds(
            estimate.mean, variance, quantile, estimate.num_items, rare
        )
    half = quantile * np.sqrt(estimate.variance)
    low, high = estimate.mean - half, estimate.mean + half
    if kind == "difference":
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    return estimate.mean, low, high


def moments(values: FloatArray, codes: NDArray[np.int_] | None = None, *, kind: Kind) -> Moments:
    """Return the moments of the mean of each row.

    values: [..., I], NaN is left out.
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
    total = count[..., None]
    scale = np.divide(
        total, total - sizes, out=np.ones_like(sizes), where=(total > sizes) & (sizes > 0)
    )
    parts = scale * off**2
    variance = parts.sum(axis=-1) / count**2
    if kind == "difference":  # add two items that differ, one each way (Bonett and Price 2012)
        floor = (np.where(valid, values, 0.0) ** 2).sum(axis=-1) + 2
        rare = _rare(values, mean, kind)
        variance = np.where(rare, np.maximum(variance, floor / (count + 2) ** 2), variance)
    return Moments(mean, variance, _freedom(parts, sizes, count, scale), count)


def family_codes(families: Sequence[Hashable] | None) -> NDArray[np.int_] | None:
    """Return a code per item, [I]: integers from 0, in the order of first appearance.

    None if there are fewer than FEWEST families.
    """
    if families is None:
        return None
    code_of = {family: code for code, family in enumerate(dict.fromkeys(families))}
    return np.array([code_of[family] for family in families]) if len(code_of) >= FEWEST else None


def _freedom(
    parts: FloatArray, sizes: FloatArray, count: NDArray[np.int_], scale: FloatArray
) -> FloatArray:
    """Degrees of freedom of the variance, [...].

    Satterthwaite's for independent items, reduced by the clusters' kurtosis: one cluster alone
    cannot estimate a variance well.
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
    excess = np.divide(fourth, second**2, out=np.full_like(second, 3.0), where=second > 0) - 3
    excess = np.maximum((num - 1) / ((num - 2) * (num - 3)) * ((num + 1) * excess + 6), 0.0)
    return np.asarray(np.maximum(2 / (2 / freedom + excess / num), 1.0))


def _rare(values: FloatArray, mean: FloatArray, kind: Kind) -> NDArray[np.bool_]:
    """Mask of the means that fewer than RARE items decide, too few for normality, [...]."""
    end = 0.0 if kind == "difference" else np.round(mean)[..., None]
    return np.asarray(telling(np.nan_to_num(values - end, nan=0.0)) < RARE)


def telling(off: FloatArray) -> FloatArray:
    """Return the effective number of items that decide a mean, [...]: k if k items have the same
    distance and the rest have 0, fewer if one outweighs the others.

    off: [..., I] distance of each value from 0 for a difference, from the nearer of 0 and 1 for a
    share.
    """
    size = np.abs(off)
    squares = (size**2).sum(axis=-1)
    return np.asarray(
        np.divide(size.sum(axis=-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)
    )


def score_bounds(
    mean: FloatArray,
    variance: FloatArray,
    quantile: FloatArray,
    num_items: NDArray[np.int_],
    rare: NDArray[np.bool_],
) -> tuple[FloatArray, FloatArray]:
    """Return (low, high) of the score interval for the number of independent draws that has this
    variance; all are [...].

    rare: mask of the means with at most one draw per item.
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
    exact = (variance == 0) & ~rare  # equal items, neither 0 nor 1: the interval is a point
    return np.where(exact, mean, low), np.where(exact, mean, high)
