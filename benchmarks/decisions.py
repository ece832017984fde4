"""Error rate and power of comparisons of two policies.

Writes docs/results/decisions.json. The decision is the product's own,
`agentgym.evaluation.paired.decide`, on simulated pairs:

- an item is harder or easier for both policies, normal with 1.5 on the logit scale;
- with families, a policy is better or worse at each, normal with `FAMILIES_SD` of success, with its
  own deviations: on the mean over families like these, two equal policies are equal;
- one policy succeeds in 50 % of its episodes, the other in `gain` more.

It is compared with other rules: the mean is higher and, if there are families, a paired t test that
treats items as independent.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import parser_of, simulated, write
from intervals import middle
from numpy.typing import NDArray
from scipy.stats import binomtest

from agentgym.evaluation.intervals import family_codes, moments
from agentgym.evaluation.paired import Pair, decide

FloatArray = NDArray[np.float64]
CONFIDENCE, ITEMS_SD, FAMILIES_SD, SUCCESS = 0.95, 1.5, 0.12, 0.5
MOST_FALSE = 0.06  # limit of each design's false positives on equal policies, upper bound
GAINS = (0.0, 0.05, 0.1)
# pairs per design; with 5,000 equal ones, 1 of 8 designs exceeds 6 % when 5 % is true
EQUAL, UNEQUAL = 20_000, 5_000


@dataclass(frozen=True)
class Case:
    items: int
    samples: int
    families: int  # 0: no families
    gain: float

    def pairs(self, num: int, generator: np.random.Generator) -> Iterator[Pair]:
        """Draw pairs: both policies' success, [items, samples] each."""
        count = range(self.items)
        families = tuple(f"f{i % self.families}" if self.families else None for i in count)
        names, codes = tuple(map(str, count)), family_codes(families)
        for _ in range(num):
            ease = ITEMS_SD * generator.standard_normal(self.items)
            played = [
                self._played(s, ease, codes, generator) for s in (SUCCESS, SUCCESS + self.gain)
            ]
            yield Pair(names, families, *played)

    def _played(
        self,
        success: float,
        ease: FloatArray,
        codes: NDArray[np.int_] | None,
        generator: np.random.Generator,
    ) -> FloatArray:
        chance = 1 / (1 + np.exp(-(middle(success, ITEMS_SD) + ease)))
        if codes is not None:  # at success 0.5, so that a shift of the chance is a shift of success
            chance = chance + FAMILIES_SD * generator.standard_normal(self.families)[codes]
        drawn = generator.random((self.items, self.samples))
        return np.asarray(drawn < np.clip(chance, 0, 1)[:, None], dtype=np.float64)


def cases() -> Iterator[Case]:
    for families, items, samples, gain in itertools.product(
        (0, 10), (100, 200, 500), (1, 4, 8), GAINS
    ):
        yield Case(items, samples, families, gain)


def simulate(case: Case, num: int, generator: np.random.Generator) -> dict[str, Any]:
    """Simulate `num` pairs. Return the share on which each rule finds a difference between the
    policies; the rule `mean` only looks for a better second policy.
    """
    ways = ("ours", "mean", "items") if case.families else ("ours", "mean")
    positives = dict.fromkeys(ways, 0)
    for pair in case.pairs(num, generator):
        gained = (pair.after - pair.before).mean(axis=1)
        positives["ours"] += decide(pair, confidence=CONFIDENCE).p_value < 1 - CONFIDENCE
        positives["mean"] += bool(gained.mean() > 0)
        if case.families:
            independent = moments(gained[None], kind="difference")
            positives["items"] += independent.p_value().item() < 1 - CONFIDENCE
    share = {name: round(count / num, 4) for name, count in positives.items()}
    upper = upper_bound(int(positives["ours"]), num)
    return {**asdict(case), "said": share, "ours_upper": round(upper, 4)}


def upper_bound(count: int, num: int) -> float:
    """Return the upper end of Wilson's interval of a share."""
    return float(binomtest(count, num).proportion_ci(CONFIDENCE, "wilson").high)


def options(
    doc: str | None, result: str, what: str, equal: int, unequal: int
) -> argparse.Namespace:
    """Parse the options of a simulation. equal, unequal: number of pairs of each kind."""
    parser = parser_of(doc, result)
    parser.add_argument("--simulations", type=int, default=equal, help=f"pairs of equal {what}")
    parser.add_argument("--unequal", type=int, default=unequal, help=f"pairs of unequal {what}")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def report(case_results: list[dict[str, Any]], simulations: int, unequal: int) -> dict[str, Any]:
    equal = [case_result for case_result in case_results if case_result["gain"] == 0]
    shares = [case_result["said"] for case_result in equal]
    clustered = [case_result["said"] for case_result in equal if case_result["families"]]
    num = simulations * len(equal)
    together = round(sum(share["ours"] * simulations for share in shares))
    return {
        "confidence": CONFIDENCE,
        "simulations": simulations,
        "simulations_unequal": unequal,
        "success": SUCCESS,
        "families_sd": FAMILIES_SD,
        "false_positives": {
            # over all designs: the highest of many is inflated by chance
            "ours": round(together / num, 4),
            "ours_upper_bound": round(upper_bound(together, num), 4),
            "ours_highest": max(share["ours"] for share in shares),
            "ours_highest_upper_bound": max(case_result["ours_upper"] for case_result in equal),
            "mean_lowest": min(share["mean"] for share in shares),
            "items_highest_with_families": max(share["items"] for share in clustered),
        },
        "cases": case_results,
    }


def main() -> int:
    chosen = options(__doc__, "decisions.json", "policies, per case", EQUAL, UNEQUAL)
    all_cases = list(cases())
    nums = [chosen.unequal if case.gain else chosen.simulations for case in all_cases]
    case_results = simulated(simulate, all_cases, nums, chosen.seed)
    result = report(case_results, chosen.simulations, chosen.unequal)
    write(chosen.out, result, rows=("cases",))
    print(*case_results, result["false_positives"], sep="\n")
    return 0 if result["false_positives"]["ours_highest_upper_bound"] <= MOST_FALSE else 1


if __name__ == "__main__":
    sys.exit(main())
