"""Coverage of confidence intervals over seeds and items, and over items and families.

`seeds` writes docs/results/coverage.json, `families` docs/results/clusters.json.
The worlds are simulated, so their truth is known; the intervals are the product's own,
`crossed_intervals` and `clustered_intervals` of `agentgym.evaluation.intervals`. An item is harder
or easier by a normal amount on the logit scale, `items_sd`, for all seeds and rows alike; `samples`
episodes per item succeed or not.
A `share` is one row's success. A `difference` is a row minus another on the same items, whose
success is half way between the first one's and 50 %.

Seeds: a seed's success is normal around `success` with standard deviation `spread`, clipped to
0 .. 1 (if clipping moves the mean, the truth is the mean after it); every seed's mean over items is
preserved; the rows of a difference have seeds of their own, as many.

Families: a family is harder or easier, too, by `families_sd`; families are drawn, so the truth is
the mean over their whole population; `metric` computes each item's value from its samples; half of
a family's deviation is specific to each policy. Three intervals are compared: the product's, one
that treats all items as independent, and the percentile bootstrap over whole families.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from harness import RESULTS, parser_of, simulated, write
from numpy.typing import NDArray
from scipy.stats import norm

from agentgym.evaluation.intervals import (
    SuccessKind,
    clustered_intervals,
    crossed_intervals,
    curves,
)

FloatArray = NDArray[np.float64]
CONFIDENCE = 0.95
BAND = (0.93, 0.97)  # applies inside the range; outside it only the lower end counts
SPREADS, SEEDS = (0.0, 0.02, 0.05, 0.12), (3, 5, 10)
METHODS = ("ours", "items", "bootstrap")
CLUSTERS = 50  # the band is promised from this number on, and for a truth from .1 to .9
SIMULATIONS = 10_000
_DRAWS = 1000  # per bootstrap
_SEEDS_CHUNK, _FAMILIES_CHUNK = 4_000_000, 1_000_000  # values at a time
KINDS: tuple[SuccessKind, ...] = ("share", "difference")


# --- seeds


@dataclass(frozen=True)
class SeedsWorld:
    kind: SuccessKind
    success: float
    spread: float
    seeds: int
    items: int
    samples: int
    items_sd: float
    inside: bool  # the range in which the band is promised


def seeds_worlds() -> Iterator[SeedsWorld]:
    inside = itertools.product((0.1, 0.3, 0.5, 0.7, 0.9), SPREADS, SEEDS, (0.0, 1.5), (1, 4), KINDS)
    for success, spread, seeds, items_sd, samples, kind in inside:
        yield SeedsWorld(kind, success, spread, seeds, 50, samples, items_sd, True)
    for success, spread, kind in itertools.product((0.1, 0.5, 0.9), SPREADS, KINDS):
        yield SeedsWorld(kind, success, spread, 3, 512, 4, 1.5, True)
    ends = ((0.02, 50), (0.98, 50), (0.1, 20), (0.5, 20), (0.9, 20))
    for (success, items), spread, seeds, items_sd, kind in itertools.product(
        ends, SPREADS, (3, 10), (0.0, 1.5, 4.0), KINDS
    ):
        yield SeedsWorld(kind, success, spread, seeds, items, 4, items_sd, False)


def simulate_seeds(world: SeedsWorld, num: int, generator: np.random.Generator) -> dict[str, Any]:
    """Simulate `num` tables of one world with their intervals. Return shares of intervals."""
    below = above = width = 0.0
    truth = cut_mean(world.success, world.spread)
    if world.kind == "difference":
        truth -= cut_mean(_other(world.success), world.spread)
    chunk = max(1, _SEEDS_CHUNK // (world.seeds * world.items))
    for first in range(0, num, chunk):
        ease = generator.standard_normal((min(chunk, num - first), 1, world.items))
        tables = _row(world, world.success, ease, generator)  # [num, seeds, items]
        if world.kind == "difference":
            tables = tables - _row(world, _other(world.success), ease, generator)
        _, low, high = crossed_intervals(tables, kind=world.kind, confidence=CONFIDENCE)
        below += int((high < truth - 1e-12).sum()) / num
        above += int((low > truth + 1e-12).sum()) / num
        width += float((high - low).sum()) / num
    shares = {"coverage": 1 - below - above, "below": below, "above": above, "width": width}
    return {**asdict(world), **{name: round(share, 4) for name, share in shares.items()}}


def _other(success: float) -> float:
    return (success + 0.5) / 2


def cut_mean(mean: float, sd: float) -> float:
    """Return the mean of a normal variable clipped to 0 .. 1."""
    if sd == 0:
        return mean
    low, high = -mean / sd, (1 - mean) / sd
    inside = mean * (norm.cdf(high) - norm.cdf(low)) + sd * (norm.pdf(low) - norm.pdf(high))
    return float(inside + norm.sf(high))


def _row(
    world: SeedsWorld, success: float, ease: FloatArray, generator: np.random.Generator
) -> FloatArray:
    """Success of each seed and item, mean over samples. ease: [num, 1, items], standard normal."""
    shift = world.spread * generator.standard_normal((len(ease), world.seeds, 1))
    per_seed = np.clip(success + shift, 0.0, 1.0)
    chance = np.broadcast_to(per_seed, (len(ease), world.seeds, world.items))
    if world.items_sd:
        logits, means = mean_of_logit(world.items_sd)
        varied = 1 / (1 + np.exp(-(np.interp(per_seed, means, logits) + world.items_sd * ease)))
        chance = np.where((per_seed == 0) | (per_seed == 1), per_seed, varied)
    return generator.binomial(world.samples, chance) / world.samples


def mean_of_logit(sd: float) -> tuple[FloatArray, FloatArray]:
    """Return (logit of the middle item, mean success over items), both increasing."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    logits = np.linspace(-30, 30, 6001)
    return logits, (1 / (1 + np.exp(-(logits[:, None] + sd * nodes)))) @ (weights / weights.sum())


# --- families


@dataclass(frozen=True)
class FamiliesWorld:
    kind: Literal["share", "difference"]
    metric: Literal["avg", "pass_at", "pass_hat"]  # at k = samples
    success: float
    items: int
    samples: int
    items_sd: float
    families: int  # 0: independent items
    families_sd: float = 0.0
    unequal: bool = False  # family sizes fall from one to the next

    @property
    def truth(self) -> float:
        ours = self._mean(self.success)
        return ours if self.kind == "share" else ours - self._mean(_other(self.success))

    @property
    def sd(self) -> float:
        return float(np.hypot(self.items_sd, self.families_sd))

    @property
    def inside(self) -> bool:
        enough = (self.families or self.items) >= CLUSTERS
        return enough and (self.kind == "difference" or 0.1 <= self.truth <= 0.9)

    def _mean(self, success: float) -> float:
        nodes, weights = np.polynomial.hermite_e.hermegauss(200)
        p = 1 / (1 + np.exp(-(middle(success, self.sd) + self.sd * nodes)))
        k = self.samples
        value = {"avg": p, "pass_at": 1 - (1 - p) ** k, "pass_hat": p**k}[self.metric]
        return float(value @ weights / weights.sum())

    def codes(self) -> NDArray[np.int_] | None:
        if not self.families:
            return None
        weight = 0.85 ** np.arange(self.families) if self.unequal else np.ones(self.families)
        ends = np.cumsum(1 + (weight / weight.sum() * (self.items - self.families)))
        return np.minimum(np.searchsorted(ends, np.arange(self.items)), self.families - 1)


def families_worlds() -> Iterator[FamiliesWorld]:
    successes = (0.1, 0.3, 0.5, 0.7, 0.9)
    for success, items, samples, sd, kind in itertools.product(
        successes, (50, 200), (1, 4, 8), (0.0, 1.5), KINDS
    ):
        yield FamiliesWorld(kind, "avg", success, items, samples, sd, 0)
    for success, items, samples, metric in itertools.product(
        successes, (50, 200), (4, 8), ("pass_at", "pass_hat")
    ):
        yield FamiliesWorld("share", metric, success, items, samples, 1.5, 0)
    for families, success, sd, unequal, samples, kind in itertools.product(
        (5, 10, 30, 60), (0.1, 0.5, 0.9), (0.0, 0.7), (False, True), (1, 4), KINDS
    ):
        yield FamiliesWorld(kind, "avg", success, 300, samples, 1.0, families, sd, unequal)


def simulate_families(
    world: FamiliesWorld, num: int, generator: np.random.Generator
) -> dict[str, Any]:
    """Simulate `num` tables of one world with their intervals."""
    outside, width = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0.0)
    codes, truth = world.codes(), world.truth
    chunk = max(1, _FAMILIES_CHUNK // max(world.items, _DRAWS))
    units = world.families if codes is not None else world.items
    # number of times that each family or item is drawn, [draws, units]
    drawn = generator.multinomial(units, np.full(units, 1 / units), size=_DRAWS).astype(np.float64)
    for first in range(0, num, chunk):
        values = _values(world, codes, min(chunk, num - first), generator)
        for method in METHODS:
            known = codes if method == "ours" else None
            if method == "bootstrap":
                low, high = _bootstrapped(values, codes, drawn)
            else:
                _, low, high = clustered_intervals(
                    values, known, kind=world.kind, confidence=CONFIDENCE
                )
            outside[method] += int(((high < truth - 1e-12) | (low > truth + 1e-12)).sum())
            width[method] += float((high - low).sum())
    return {
        **asdict(world),
        "inside": world.inside,
        "truth": round(truth, 4),
        "coverage": {method: round(1 - outside[method] / num, 4) for method in METHODS},
        "width": {method: round(width[method] / num, 4) for method in METHODS},
    }


@cache
def middle(success: float, sd: float) -> float:
    """Return the logit of the middle item if the mean over items is `success`."""
    if not sd:
        return float(np.log(success / (1 - success)))
    logits, means = mean_of_logit(sd)
    return float(np.interp(success, means, logits))


def _values(
    world: FamiliesWorld, codes: NDArray[np.int_] | None, num: int, generator: np.random.Generator
) -> FloatArray:
    """Return the values of the simulated items, [num, items]."""
    ease = world.items_sd * generator.standard_normal((num, world.items))
    shared, *by_policy = (
        generator.standard_normal((num, max(world.families, 1))) for _ in range(3)
    )

    def row(success: float, by_one_policy: FloatArray) -> FloatArray:
        of_family = shared if world.kind == "share" else (shared + by_one_policy) / np.sqrt(2)
        shift = 0.0 if codes is None else world.families_sd * of_family[:, codes]
        chance = 1 / (1 + np.exp(-(middle(success, world.sd) + ease + shift)))
        hits = generator.binomial(world.samples, chance)
        if world.metric == "avg":
            return np.asarray(hits / world.samples)
        at, hat = curves(np.full(hits.size, world.samples), hits.ravel(), world.samples)
        chosen = (at if world.metric == "pass_at" else hat)[:, -1]
        return np.asarray(chosen.reshape(hits.shape))

    ours = row(world.success, by_policy[0])
    return ours if world.kind == "share" else ours - row(_other(world.success), by_policy[1])


def _bootstrapped(
    values: FloatArray, codes: NDArray[np.int_] | None, drawn: FloatArray
) -> tuple[FloatArray, FloatArray]:
    sums, sizes = values, np.ones(values.shape[1])
    if codes is not None:
        of_family = np.eye(int(codes.max()) + 1)[codes]
        sums, sizes = values @ of_family, sizes @ of_family
    means = (sums @ drawn.T) / (drawn @ sizes)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=1)
    return low, high


# --- both


def within(cell: dict[str, Any]) -> bool:
    """Return True if the product's coverage is in the band. One episode of each of 50 items has 51
    possible results, and Wilson's interval of these covers exactly 97.03 % at 10 and at 90 %: such
    a cell is reported as outside.
    """
    coverage = cell["coverage"]
    ours = coverage["ours"] if isinstance(coverage, dict) else coverage
    return bool(ours >= BAND[0] and (ours <= BAND[1] or not cell["inside"]))


def report(cells: list[dict[str, Any]], simulations: int) -> dict[str, Any]:
    def span(inside: bool) -> dict[str, Any]:
        values = [cell["coverage"] for cell in cells if cell["inside"] is inside]
        if isinstance(values[0], dict):
            return {method: ends([value[method] for value in values]) for method in METHODS}
        return ends(values)

    def ends(coverages: list[float]) -> dict[str, Any]:
        return {"cells": len(coverages), "lowest": min(coverages), "highest": max(coverages)}

    settings = {"confidence": CONFIDENCE, "band": list(BAND), "simulations": simulations}
    spans = {"inside": span(True), "outside": span(False)}
    outside_band = [cell for cell in cells if not within(cell)]
    return {**settings, **spans, "outside_band": outside_band, "cells": cells}


PARTS: dict[str, tuple[Any, Any, str]] = {
    "seeds": (seeds_worlds, simulate_seeds, "coverage.json"),
    "families": (families_worlds, simulate_families, "clusters.json"),
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help="per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=type(RESULTS), default=RESULTS, help="folder")
    chosen = parser.parse_args()
    num_outside = 0
    for part in chosen.parts or PARTS:
        worlds, simulate, name = PARTS[part]
        all_worlds = list(worlds())
        nums = [chosen.simulations] * len(all_worlds)
        result = report(simulated(simulate, all_worlds, nums, chosen.seed), chosen.simulations)
        write(chosen.out / name, result, rows=("outside_band", "cells"))
        print(f"{part}: inside the range {result['inside']}, outside {result['outside']}")
        num_outside += len(result["outside_band"])
    return int(num_outside > 0)


if __name__ == "__main__":
    sys.exit(main())
