"""How often a comparison of two policies is wrong, and how often it sees what is there: `python
benchmarks/decisions.py` (`make decisions`).

Writes docs/results/decisions.json. The decision is the product's own,
`agentgym.evaluation.paired.decide`, on pairs made here:

- an item is harder or easier for both policies, normal with 1.5 on the logit scale;
- with families, a policy is better or worse at each, normal with `FAMILIES_SD` of success, and the
  deviations are its own: on the mean over families like these, two equal policies are equal;
- the one policy succeeds in 50 % of its episodes, the other in `gain` more.

Beside it stand other ways to decide: that the mean is higher and, where there are families, a
paired t test that takes every item for itself, and one that turns the signs of whole families.
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
from clusters import middle
from numpy.typing import NDArray
from pipeline import machine

from agentgym.evaluation.clustered import family_codes, moments
from agentgym.evaluation.paired import Pair, decide
from agentgym.evaluation.passk import wilson_interval

FloatArray = NDArray[np.float64]
OUT = Path(__file__).parents[1] / "docs/results/decisions.json"
CONFIDENCE, ITEMS_SD, FAMILIES_SD, SUCCESS = 0.95, 1.5, 0.12, 0.5
MOST_FALSE = 0.06  # of the decisions on equal policies, upper bound, of each design
GAINS = (0.0, 0.05, 0.1)
# pairs per design; of 5,000 equal ones, 1 of 8 designs shows more than 6 % where 5 % is true
EQUAL, UNEQUAL = 20_000, 5_000
_FLIPS = 199


@dataclass(frozen=True)
class Case:
    items: int
    samples: int
    families: int  # 0: none
    gain: float


def cases() -> Iterator[Case]:
    for families, items, samples, gain in itertools.product(
        (0, 10), (100, 200, 500), (1, 4, 8), GAINS
    ):
        yield Case(items, samples, families, gain)


def simulate(case: Case, num: int, generator: np.random.Generator) -> dict[str, Any]:
    """Share of `num` pairs on which each way to decide says that the second policy is not as
    good as the first one, better or worse; the mean's says only better.
    """
    ways = ("ours", "mean", "items", "signs") if case.families else ("ours", "mean")
    said = dict.fromkeys(ways, 0)
    families = (
        tuple(f"f{item % case.families}" for item in range(case.items))
        if (case.families)
        else (None,) * case.items
    )
    names = tuple(map(str, range(case.items)))
    codes = family_codes(families)
    for _ in range(num):
        before, after = drawn_pair(case, codes, generator)
        found = decide(Pair(names, families, before, after), confidence=CONFIDENCE)
        gained = (after - before).mean(axis=1)
        said["ours"] += found.p_value < 1 - CONFIDENCE
        said["mean"] += bool(gained.mean() > 0)
        if codes is not None:
            alone = moments(gained[None], kind="difference")
            said["items"] += alone.p_value().item() < 1 - CONFIDENCE
            said["signs"] += _turned(gained, codes, generator) <= 1 - CONFIDENCE
    share = {name: round(count / num, 4) for name, count in said.items()}
    upper = wilson_interval(int(said["ours"]), num, CONFIDENCE).high
    return {**asdict(case), "said": share, "ours_upper": round(upper, 4)}


def drawn_pair(
    case: Case, codes: NDArray[np.int_] | None, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """[items, samples] success of both."""
    ease = ITEMS_SD * generator.standard_normal(case.items)

    def played(success: float) -> FloatArray:
        chance = 1 / (1 + np.exp(-(middle(success, ITEMS_SD) + ease)))
        if codes is not None:  # in the middle, where a shift of success is one
            chance = chance + FAMILIES_SD * generator.standard_normal(case.families)[codes]
        drawn = generator.random((case.items, case.samples))
        return np.asarray(drawn < np.clip(chance, 0, 1)[:, None], dtype=np.float64)

    return played(SUCCESS), played(SUCCESS + case.gain)


def _turned(gained: FloatArray, codes: NDArray[np.int_], generator: np.random.Generator) -> float:
    """p of the sign-flip test of whole families, by random flips."""
    sums = np.bincount(codes, gained)
    flips = 2.0 * generator.integers(0, 2, size=(_FLIPS, len(sums))) - 1.0
    seen = abs(sums.sum()) - 1e-9
    return float((1 + (np.abs(flips @ sums) >= seen).sum()) / (1 + _FLIPS))


def report(found: list[dict[str, Any]], simulations: int, unequal: int) -> dict[str, Any]:
    equal = [each for each in found if each["gain"] == 0]
    clustered = [each for each in equal if each["families"]]
    num = simulations * len(equal)
    together = wilson_interval(
        round(sum(each["said"]["ours"] * simulations for each in equal)), num, CONFIDENCE
    )
    return {
        "confidence": CONFIDENCE,
        "simulations": simulations,
        "simulations_unequal": unequal,
        "success": SUCCESS,
        "families_sd": FAMILIES_SD,
        "false_positives": {
            # of all designs together; one of many is the highest by chance alone
            "ours": round(together.mean, 4),
            "ours_upper_bound": round(together.high, 4),
            "ours_highest": max(each["said"]["ours"] for each in equal),
            "ours_highest_upper_bound": max(each["ours_upper"] for each in equal),
            "mean_lowest": min(each["said"]["mean"] for each in equal),
            "items_highest_with_families": max(each["said"]["items"] for each in clustered),
            "signs_highest_with_families": max(each["said"]["signs"] for each in clustered),
        },
        "cases": found,
    }


def text(result: dict[str, Any]) -> str:
    false = result["false_positives"]
    lines = [
        "equal policies called different: "
        f"ours {false['ours']:.1%} (upper bound {false['ours_upper_bound']:.1%}; of one design at"
        f" most {false['ours_highest']:.1%}, upper bound"
        f" {false['ours_highest_upper_bound']:.1%}); the mean is higher, at least"
        f" {false['mean_lowest']:.1%}; items for themselves, with families, up to"
        f" {false['items_highest_with_families']:.1%}",
        "power: items x samples, families -> at +5 and +10 points",
    ]
    by_case = {
        (each["families"], each["items"], each["samples"], each["gain"]): each["said"]["ours"]
        for each in result["cases"]
    }
    for families, items, samples, gain in by_case:
        if gain == GAINS[1]:
            powers = [by_case[families, items, samples, each] for each in GAINS[1:]]
            told = f"{families} families" if families else "no families"
            lines.append(f"{items} x {samples}, {told}: {powers[0]:.2f}, {powers[1]:.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--simulations", type=int, default=EQUAL, help="of equal policies, per case"
    )
    parser.add_argument("--unequal", type=int, default=UNEQUAL, help="of unequal ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    asked = list(cases())
    streams = np.random.SeedSequence(chosen.seed).spawn(len(asked))
    found = []
    with ProcessPoolExecutor(chosen.parallel) as pool:
        nums = [chosen.unequal if case.gain else chosen.simulations for case in asked]
        for each in pool.map(_simulated, asked, nums, streams):
            found.append(each)
            print(f"{len(found)}/{len(asked)} {each}", file=sys.stderr)
    result = report(found, chosen.simulations, chosen.unequal)
    command = "python benchmarks/decisions.py" + (
        f" --simulations {chosen.simulations}" if chosen.simulations != EQUAL else ""
    )
    result |= {"machine": machine(), "command": command}
    rows = ",\n  ".join(json.dumps(each) for each in result.pop("cases"))
    chosen.out.write_text(
        json.dumps(result, indent=1)[:-2] + f',\n "cases": [\n  {rows}\n ]\n}}\n', encoding="utf-8"
    )
    print(text(result | {"cases": found}))
    return 0 if result["false_positives"]["ours_highest_upper_bound"] <= MOST_FALSE else 1


def _simulated(case: Case, num: int, stream: np.random.SeedSequence) -> dict[str, Any]:
    """A stream per case: how many processes there are changes nothing."""
    return simulate(case, num, np.random.Generator(np.random.Philox(stream)))


if __name__ == "__main__":
    sys.exit(main())
