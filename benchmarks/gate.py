"""False promotions and power of the gate: `python benchmarks/gate.py`.

Writes docs/results/gate.json. The gate is the product's own, `agentgym.evaluation.gate.judge` with
the rules of params.yaml, on pairs that `benchmarks/decisions.py` draws: both with equal success,
the candidate better by a few points, or worse by as many. `looks`: twenty equal candidates, one
after the other, against one champion's outcomes on one set of items.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from decisions import ITEMS_SD, SUCCESS, Case, options, upper_bound
from harness import ROOT, simulated, write
from intervals import middle

from agentgym.config import GateConfig, load_config
from agentgym.evaluation.gate import Evidence, judge
from agentgym.evaluation.paired import Pair

CONFIDENCE, MOST_FALSE = 0.95, 0.06  # limit of each design's false promotions, upper bound
GAINS = (-0.05, 0.0, 0.05, 0.1)
LOOKS = 20
DESIGNS = ((200, 1, 0), (200, 4, 0), (512, 1, 0), (512, 4, 0), (512, 4, 10))  # items, samples,
# families; the fourth is the default run's


def simulate(
    rules: GateConfig, case: Case, num: int, generator: np.random.Generator
) -> dict[str, Any]:
    pairs = case.pairs(num, generator)
    verdicts = Counter(judge(rules, Evidence({"babyai": pair}, True)).verdict for pair in pairs)
    shares = {
        verdict: round(verdicts[verdict] / num, 4) for verdict in ("PROMOTE", "HOLD", "REJECT")
    }
    upper = upper_bound(verdicts["PROMOTE"], num)
    return {**asdict(case), **shares, "promote_upper": round(upper, 4)}


def looked_at_often(num: int, rules: GateConfig, generator: np.random.Generator) -> float:
    """Return the share of item sets on which at least one of LOOKS equal candidates is promoted."""
    case, names, num_promoted = Case(512, 4, 0, 0.0), tuple(map(str, range(512))), 0
    for _ in range(num):
        ease = ITEMS_SD * generator.standard_normal(case.items)  # of both models, by item
        chance = 1 / (1 + np.exp(-(middle(SUCCESS, ITEMS_SD) + ease)))[:, None]
        champion, *others = (
            (generator.random((case.items, case.samples)) < chance).astype(float)
            for _ in range(LOOKS + 1)
        )
        pairs = (Pair(names, (None,) * case.items, champion, candidate) for candidate in others)
        num_promoted += any(
            judge(rules, Evidence({"babyai": pair}, True)).verdict == "PROMOTE" for pair in pairs
        )
    return round(num_promoted / num, 4)


def main() -> int:
    chosen = options(__doc__, "gate.json", "models, per design", 5000, 1000)
    rules = load_config(ROOT / "params.yaml").gate
    all_cases = [Case(*design, gain) for design in DESIGNS for gain in GAINS]
    nums = [chosen.unequal if case.gain else chosen.simulations for case in all_cases]
    cases = simulated(partial(simulate, rules), all_cases, nums, chosen.seed)
    equal_cases = [case_result for case_result in cases if not case_result["gain"]]
    default = equal_cases[DESIGNS.index((512, 4, 0))]
    (last,) = np.random.SeedSequence(chosen.seed, n_children_spawned=len(all_cases)).spawn(1)
    generator = np.random.Generator(np.random.Philox(last))
    result = {
        "rules": rules.semantic(),
        "simulations": chosen.simulations,
        "simulations_unequal": chosen.unequal,
        "false_promotions": default["PROMOTE"],
        "false_promotions_upper": default["promote_upper"],
        "highest": max(case_result["PROMOTE"] for case_result in equal_cases),
        "highest_upper": max(case_result["promote_upper"] for case_result in equal_cases),
        "looks": looked_at_often(max(1, chosen.unequal // 5), rules, generator),
        "cases": cases,
    }
    write(chosen.out, result, rows=("cases",))
    print(*cases, {name: value for name, value in result.items() if name != "cases"}, sep="\n")
    return 0 if result["highest_upper"] <= MOST_FALSE else 1


if __name__ == "__main__":
    sys.exit(main())
