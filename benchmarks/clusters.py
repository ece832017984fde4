"""Coverage of confidence intervals over items, with and without families.

    python benchmarks/clusters.py    # or make coverage

Writes docs/results/clusters.json.
The worlds are simulated, so their truth is known; the interval is the product's own,
`agentgym.evaluation.clustered.clustered_intervals`.
In one world:

- an item is harder or easier by a normal amount on the logit scale, `items_sd`, and so is a family,
  `families_sd`; families are drawn, so the truth is the mean over their whole population;
- `samples` episodes per item succeed or not, and `metric` computes each item's value from them;
- a `difference` is a policy minus another on the same items, whose success is half way between the
  first one's and 50 %; half of a family's deviation is specific to each policy.

Three intervals are compared: the product's, one that treats all items as independent, and the
percentile bootstrap over whole families.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from coverage import BAND, CONFIDENCE, dump, mean_of_logit
from numpy.typing import NDArray
from pipeline import machine

from agentgym.evaluation.clustered import clustered_intervals
from agentgym.evaluation.passk import curves

FloatArray = NDArray[np.float64]
OUT = Path(__file__).parents[1] / "docs/results/clusters.json"
METHODS = ("ours", "items", "bootstrap")
CLUSTERS = 50  # the band is promised from this number on, and for a truth from .1 to .9
_DRAWS = 1000  # per bootstrap
_CHUNK = 1_000_000  # values at a time


@dataclass(frozen=True)
class World:
    """One cell of the simulation."""

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
        return ours if self.kind == "share" else ours - self._mean(self.other)

    @property
    def other(self) -> float:
        return (self.success + 0.5) / 2

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


def worlds() -> Iterator[World]:
    for success, items, samples, sd, kind in itertools.product(
        (0.1, 0.3, 0.5, 0.7, 0.9), (50, 200), (1, 4, 8), (0.0, 1.5), ("share", "difference")
    ):
        yield World(kind, "avg", success, items, samples, sd, 0)
    for success, items, samples, metric in itertools.product(
        (0.1, 0.3, 0.5, 0.7, 0.9), (50, 200), (4, 8), ("pass_at", "pass_hat")
    ):
        yield World("share", metric, success, items, samples, 1.5, 0)
    for families, success, sd, unequal, samples, kind in itertools.product(
        (5, 10, 30, 60),
        (0.1, 0.5, 0.9),
        (0.0, 0.7),
        (False, True),
        (1, 4),
        ("share", "difference"),
    ):
        yield World(kind, "avg", success, 300, samples, 1.0, families, sd, unequal)


def simulate(world: World, num: int, generator: np.random.Generator) -> dict[str, Any]:
    """Simulate `num` tables of one world, each with its intervals."""
    outside = dict.fromkeys(METHODS, 0)
    width = dict.fromkeys(METHODS, 0.0)
    codes, truth = world.codes(), world.truth
    chunk = max(1, _CHUNK // max(world.items, _DRAWS))
    drawn = _drawn(world, codes, generator)
    for first in range(0, num, chunk):
        values = _values(world, codes, min(chunk, num - first), generator)
        for method in METHODS:
            if method == "bootstrap":
                low, high = _bootstrapped(values, codes, drawn)
            else:
                known = codes if method == "ours" else None
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
    """Logit of the middle item if the mean over items is `success`."""
    if not sd:
        return float(np.log(success / (1 - success)))
    logits, means = mean_of_logit(sd)
    return float(np.interp(success, means, logits))


def _values(
    world: World, codes: NDArray[np.int_] | None, num: int, generator: np.random.Generator
) -> FloatArray:
    """Values of the simulated items, [num, items]."""
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
    return ours if world.kind == "share" else ours - row(world.other, by_policy[1])


def _drawn(
    world: World, codes: NDArray[np.int_] | None, generator: np.random.Generator
) -> FloatArray:
    """Number of times that each family or item is drawn, [draws, families or items]."""
    num = world.families if codes is not None else world.items
    return generator.multinomial(num, np.full(num, 1 / num), size=_DRAWS).astype(np.float64)


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


def report(cells: list[dict[str, Any]], simulations: int) -> dict[str, Any]:
    def span(inside: bool, method: str) -> dict[str, Any]:
        coverages = [cell["coverage"][method] for cell in cells if cell["inside"] is inside]
        return {"cells": len(coverages), "lowest": min(coverages), "highest": max(coverages)}

    return {
        "confidence": CONFIDENCE,
        "band": list(BAND),
        "simulations": simulations,
        "inside": {method: span(True, method) for method in METHODS},
        "outside": {method: span(False, method) for method in METHODS},
        "outside_band": [cell for cell in cells if not within(cell)],
        "cells": cells,
    }


def within(cell: dict[str, Any]) -> bool:
    """Return True if the coverage is in the band. One episode of each of 50 items has 51 possible
    results, and Wilson's interval of these covers exactly 97.03 % at 10 and at 90 %: such a cell is
    reported as outside.
    """
    ours = cell["coverage"]["ours"]
    return bool(ours >= BAND[0] and (ours <= BAND[1] or not cell["inside"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=10_000, help="per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    all_worlds = list(worlds())
    streams = np.random.SeedSequence(chosen.seed).spawn(len(all_worlds))
    cells = []
    with ProcessPoolExecutor(chosen.parallel) as pool:
        for cell in pool.map(
            _simulated, all_worlds, [chosen.simulations] * len(all_worlds), streams
        ):
            cells.append(cell)
            print(f"{len(cells)}/{len(all_worlds)} {cell['coverage']} {cell}", file=sys.stderr)
    result = report(cells, chosen.simulations)
    command = "python benchmarks/clusters.py" + (
        f" --simulations {chosen.simulations}" if chosen.simulations != 10_000 else ""
    )
    result |= {"machine": machine(), "command": command}
    chosen.out.write_text(dump(result), encoding="utf-8")
    for name in ("inside", "outside"):
        for method, span in result[name].items():
            print(
                f"{name} the range, {method}: {span['cells']} cells, coverage"
                f" {span['lowest']:.1%} to {span['highest']:.1%}"
            )
    return 0 if not result["outside_band"] else 1


def _simulated(world: World, num: int, stream: np.random.SeedSequence) -> dict[str, Any]:
    """Simulate with one random stream per cell: the number of processes changes nothing."""
    return simulate(world, num, np.random.Generator(np.random.Philox(stream)))


if __name__ == "__main__":
    sys.exit(main())
