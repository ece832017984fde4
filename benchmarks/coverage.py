"""Coverage of confidence intervals over seeds and items.

    python benchmarks/coverage.py    # or make coverage

Writes docs/results/coverage.json.
The worlds are simulated, so their truth is known; the interval is the product's own,
`agentgym.evaluation.seeds.crossed_intervals`.
In one world:

- a seed's success is normal around `success` with standard deviation `spread`, clipped to 0 .. 1
  (if clipping moves the mean, the truth is the mean after it);
- an item is harder or easier by a normal amount on the logit scale, `items_sd`, for all seeds and
  both rows alike; every seed's mean over items is preserved;
- an episode succeeds or not; `samples` episodes per item and seed.

A `share` is one row's success.
A `difference` is a row minus another with the same items and its own seeds (as many), whose success
is half way between the first one's and 50 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pipeline import machine
from scipy.stats import norm

from agentgym.evaluation.seeds import Kind, crossed_intervals

FloatArray = NDArray[np.float64]
OUT = Path(__file__).parents[1] / "docs/results/coverage.json"
CONFIDENCE = 0.95
BAND = (0.93, 0.97)  # applies inside the range; outside it only the lower end counts
SPREADS, SEEDS = (0.0, 0.02, 0.05, 0.12), (3, 5, 10)
_CHUNK = 4_000_000  # values at a time


@dataclass(frozen=True)
class World:
    """One cell of the simulation."""

    kind: Kind
    success: float
    spread: float
    seeds: int
    items: int
    samples: int
    items_sd: float
    inside: bool  # the range in which the band is promised


@dataclass(frozen=True)
class Found:
    world: World
    coverage: float
    below: float  # share of intervals below the truth
    above: float
    width: float  # mean

    @property
    def ok(self) -> bool:
        return BAND[0] <= self.coverage and (self.coverage <= BAND[1] or not self.world.inside)


def worlds() -> Iterator[World]:
    inside = itertools.product(
        (0.1, 0.3, 0.5, 0.7, 0.9), SPREADS, SEEDS, (0.0, 1.5), (1, 4), ("share", "difference")
    )
    for success, spread, seeds, items_sd, samples, kind in inside:
        yield World(kind, success, spread, seeds, 50, samples, items_sd, True)
    for success, spread, kind in itertools.product(
        (0.1, 0.5, 0.9), SPREADS, ("share", "difference")
    ):
        yield World(kind, success, spread, 3, 512, 4, 1.5, True)
    ends = ((0.02, 50), (0.98, 50), (0.1, 20), (0.5, 20), (0.9, 20))
    for (success, items), spread, seeds, items_sd, kind in itertools.product(
        ends, SPREADS, (3, 10), (0.0, 1.5, 4.0), ("share", "difference")
    ):
        yield World(kind, success, spread, seeds, items, 4, items_sd, False)


def simulate(world: World, num: int, generator: np.random.Generator) -> Found:
    """Simulate `num` tables of one world, each with its interval."""
    ends = [0, 0]
    width = 0.0
    truth = _truth(world)
    chunk = max(1, _CHUNK // (world.seeds * world.items))
    for first in range(0, num, chunk):
        tables = _tables(world, min(chunk, num - first), generator)
        _, low, high = crossed_intervals(tables, kind=world.kind, confidence=CONFIDENCE)
        ends[0] += int((high < truth - 1e-12).sum())
        ends[1] += int((low > truth + 1e-12).sum())
        width += float((high - low).sum())
    below, above = ends[0] / num, ends[1] / num
    return Found(
        world, round(1 - below - above, 4), round(below, 4), round(above, 4), round(width / num, 4)
    )


def _other(success: float) -> float:
    return (success + 0.5) / 2


def _truth(world: World) -> float:
    ours = cut_mean(world.success, world.spread)
    return ours if world.kind == "share" else ours - cut_mean(_other(world.success), world.spread)


def cut_mean(mean: float, sd: float) -> float:
    """Mean of a normal variable clipped to 0 .. 1."""
    if sd == 0:
        return mean
    low, high = -mean / sd, (1 - mean) / sd
    inside = mean * (norm.cdf(high) - norm.cdf(low)) + sd * (norm.pdf(low) - norm.pdf(high))
    return float(inside + norm.sf(high))


def _tables(world: World, num: int, generator: np.random.Generator) -> FloatArray:
    """Simulated tables, [num, seeds, items]."""
    ease = generator.standard_normal((num, 1, world.items))
    ours = _row(world, world.success, ease, generator)
    return (
        ours
        if world.kind == "share"
        else ours - _row(world, _other(world.success), ease, generator)
    )


def _row(
    world: World, success: float, ease: FloatArray, generator: np.random.Generator
) -> FloatArray:
    """Success of each seed and item, mean over samples. ease: [num, 1, items], standard normal."""
    per_seed = np.clip(
        success + world.spread * generator.standard_normal((len(ease), world.seeds, 1)), 0.0, 1.0
    )
    if world.items_sd:
        logits, means = mean_of_logit(world.items_sd)
        chance = 1 / (1 + np.exp(-(np.interp(per_seed, means, logits) + world.items_sd * ease)))
        chance = np.where((per_seed == 0) | (per_seed == 1), per_seed, chance)
    else:
        chance = np.broadcast_to(per_seed, (len(ease), world.seeds, world.items))
    return generator.binomial(world.samples, chance) / world.samples


def mean_of_logit(sd: float) -> tuple[FloatArray, FloatArray]:
    """(logit of the middle item, mean success over items), both rising."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    logits = np.linspace(-30, 30, 6001)
    return logits, (1 / (1 + np.exp(-(logits[:, None] + sd * nodes)))) @ (weights / weights.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=10_000, help="per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    cells = list(worlds())
    streams = np.random.SeedSequence(chosen.seed).spawn(len(cells))
    simulated = []
    with ProcessPoolExecutor(chosen.parallel) as pool:
        for cell_result in pool.map(_simulated, cells, [chosen.simulations] * len(cells), streams):
            simulated.append(cell_result)
            print(
                f"{len(simulated)}/{len(cells)} {cell_result.coverage:.3f} {cell_result.world}",
                file=sys.stderr,
            )
    result = report(simulated, chosen.simulations)
    command = "python benchmarks/coverage.py" + (
        f" --simulations {chosen.simulations}" if chosen.simulations != 10_000 else ""
    )
    result |= {"machine": machine(), "command": command}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(dump(result), encoding="utf-8")
    print(text(result))
    return 0 if not result["outside_band"] else 1


def _simulated(world: World, num: int, stream: np.random.SeedSequence) -> Found:
    """Simulate with one random stream per cell: the number of processes changes nothing."""
    return simulate(world, num, np.random.Generator(np.random.Philox(stream)))


def report(simulated: list[Found], simulations: int) -> dict[str, Any]:
    def span(inside: bool) -> dict[str, Any]:
        values = [
            cell_result.coverage for cell_result in simulated if cell_result.world.inside is inside
        ]
        return (
            {"cells": len(values), "lowest": min(values), "highest": max(values)} if values else {}
        )

    return {
        "confidence": CONFIDENCE,
        "band": list(BAND),
        "simulations": simulations,
        "inside": span(True),
        "outside": span(False),
        "outside_band": [_flat(cell_result) for cell_result in simulated if not cell_result.ok],
        "cells": [_flat(cell_result) for cell_result in simulated],
    }


def _flat(simulated: Found) -> dict[str, Any]:
    return {
        **asdict(simulated.world),
        "coverage": simulated.coverage,
        "below": simulated.below,
        "above": simulated.above,
        "width": simulated.width,
    }


def dump(result: dict[str, Any]) -> str:
    """JSON with a line per cell."""
    lists = {
        name: [json.dumps(cell) for cell in result[name]] for name in ("outside_band", "cells")
    }
    rest = json.dumps(
        {name: value for name, value in result.items() if name not in lists}, indent=1
    )
    parts = [
        f' "{name}": [\n  ' + ",\n  ".join(rows) + "\n ]" if rows else f' "{name}": []'
        for name, rows in lists.items()
    ]
    return rest[:-2] + ",\n" + ",\n".join(parts) + "\n}\n"


def text(result: dict[str, Any]) -> str:
    lines = []
    for name in ("inside", "outside"):
        span = result[name]
        if span:
            lines.append(
                f"{name} the range: {span['cells']} cells, coverage {span['lowest']:.1%} to"
                f" {span['highest']:.1%}"
            )
    lines += [f"out of the band: {cell}" for cell in result["outside_band"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
