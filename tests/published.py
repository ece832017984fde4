"""Numbers of the result files in docs/results as documents print them: helpers of
tests/test_numbers.py, and the numbers of the task behind a locked door.
"""

import json
import math
import statistics
from pathlib import Path

from scipy import stats

from agentgym.config import load_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(share, digits=0):
    return f"{100 * share:.{digits}f}"


def signed(*points):
    return [f"{each:+.1f}" for each in points]


def long_against_sft():
    """{measure: (mean, low, high, p, least)} of the paired difference of GRPO on the long horizon
    and supervised learning, in points: Student's t over seeds.
    """
    rows = {row["name"].removesuffix(", locked door"): row for row in result("unlock")["rows"]}
    a, b = (rows[name]["success"] for name in ("grpo long", "sft"))
    found = {}
    for measure in ("avg_at_4", "greedy", "pass_at_4"):
        pairs = zip(a[measure]["per_seed"], b[measure]["per_seed"], strict=True)
        differences = [100 * (x - y) for x, y in pairs]
        mean = statistics.mean(differences)
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        half = stats.t.ppf(0.975, len(differences) - 1) * error
        p = 2 * stats.t.sf(abs(mean / error), len(differences) - 1)
        found[measure] = (mean, mean - half, mean + half, p, min(differences))
    return found


def p_value(p):
    return f"{p:.3f}".lstrip("0")


def equal_cpu():
    """Numbers of the long horizon against supervised learning: ends, cost, three measures."""
    rows = {row["name"].removesuffix(", locked door"): row for row in result("unlock")["rows"]}
    ends = [percent(rows[name]["success"]["avg_at_4"]["mean"]) for name in ("grpo long", "sft")]
    cost = sum(rows["sft"]["cost"]["cpu_s"]) / sum(rows["grpo long"]["cost"]["cpu_s"])
    sampled, greedy, pass_at_4 = long_against_sft().values()
    assert greedy[4] < 0
    return [
        *(*ends, f"{cost:.2f}"),
        *(*signed(*sampled[:3]), p_value(sampled[3]), str(len(rows["sft"]["seeds"]))),
        *signed(sampled[4], *greedy[:3], *pass_at_4[:3]),
    ]


def choosing_seeds():
    """Seeds of the trials that chose the locked door."""
    trials = [run for run in result("tasks_tried")["runs"] if run["levels"] == ["UnlockLocal"]]
    return sorted({str(run["seed"]) for run in trials})


def unlock():
    """Numbers of the locked door: starts and ends, the two contrasts and their cost."""
    found = result("unlock")
    rows = {row["name"].removesuffix(", locked door"): row for row in found["rows"]}
    growing, short, long, sft = (
        rows[name] for name in ("grpo ScalingInter", "grpo short", "grpo long", "sft")
    )
    apart = {
        pair["b"]: {
            key: (f"{100 * value:+.1f}" if isinstance(value, float) else value)
            for key, value in pair["difference"]["avg_at_4"].items()
        }
        for pair in found["contrasts"]
        if pair["a"] == growing["name"]
    }
    cpu = {row["name"]: sum(row["cost"]["cpu_s"]) for row in (growing, long, sft)}
    success = {name: row["success"]["avg_at_4"]["mean"] for name, row in rows.items()}
    (items,) = {row["evaluation"]["num_items"] for row in rows.values()}
    per_seed = next(p for p in found["contrasts"] if p["b"] == sft["name"])["difference"]
    seeds = str(len(growing["seeds"]))
    return [
        str(load_config(ROOT / "profiles/babyai-unlock-cpu.yaml").warm_start.num_demos),
        percent(growing["start"]["avg_at_4"]["mean"]),
        percent(success["grpo ScalingInter"]),
        f"{cpu[sft['name']] / cpu[growing['name']]:.2f}",
        percent(success["sft"]),
        *(apart[sft["name"]][key] for key in ("mean", "low", "high")),
        seeds,
        f"{100 * min(per_seed['avg_at_4']['per_seed']):+.1f}",
        *(apart[short["name"]][key] for key in ("mean", "low", "high")),
        seeds,
        *(apart[long["name"]][key] for key in ("low", "high")),
        f"{cpu[growing['name']] / cpu[long['name']]:.2f}",
        str(items),
    ]
