"""Cost and gain of rollouts ahead of the updates: `python benchmarks/staleness.py [--seeds 0 1]`.

Runs the default task, with the changes in BUDGET, at each `rollout.max_staleness`, one after
another under each seed: unchanged, and with a learner so slow that each batch reaches the maximal
staleness.
Cells that docs/results/staleness.json contains are not repeated; that file is rewritten after each.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import harness

from agentgym.defaults import set_process_defaults
from agentgym.pipeline.run import run_with_parents
from agentgym.training.ahead import Ahead

CASES = {
    "as it is": (0, 1, 4),
    "slow learner": (1, 4),  # at 0 a slow learner changes nothing
}
BUDGET = ("horizon.stage_steps=[6,6,8]", "evaluation.num_items=256")
LIMIT_S = 3600.0  # per run
MEANS = ("avg_at_4", "greedy", "train_s", "train_cpu_s", "learner_idle_frac")


def main() -> int:
    parser = harness.parser_of(__doc__, "staleness.json", seeds=(0, 1), state=True)
    chosen = parser.parse_args()
    os.chdir(harness.ROOT)
    set_process_defaults()
    result = harness.read(chosen.out, {"cells": []})
    result["settings"] = BUDGET
    with harness.kept(chosen.state) as folder:
        for case, seed, staleness in cells(chosen.seeds):
            key = {"case": case, "seed": seed, "max_staleness": staleness}
            if any(key.items() <= cell.items() for cell in result["cells"]):
                continue
            result["cells"].append(key | run(case, seed, staleness, folder))
            result["summary"] = summary(result["cells"])
            harness.write(chosen.out, result)
            print(result["cells"][-1], flush=True)
    return 0


def cells(seeds: list[int]) -> list[tuple[str, int, int]]:
    """Return all (case, seed, max_staleness); no max_staleness always comes first."""
    return [
        (case, seed, staleness)
        for number, seed in enumerate(seeds)
        for case, values in CASES.items()
        for staleness in values[:: -1 if number % 2 else 1]
    ]


def run(case: str, seed: int, staleness: int, folder: Path) -> dict[str, Any]:
    """Train the stages, and evaluate the last weights on the test items."""
    state, base = folder / f"{case}-{seed}".replace(" ", "-"), folder / f"base-{seed}"
    settings = [*BUDGET, f"seed={seed}"]
    if not state.exists():
        run_with_parents("evaluate-warm-start", harness.config_in(base, *settings))
        shutil.copytree(base, state)
    cfg = harness.config_in(state, *settings, f"rollout.max_staleness={staleness}")
    last = harness.last_stage(cfg)
    take = partialmethod(late, Ahead.take) if case == "slow learner" else Ahead.take
    with mock.patch.object(Ahead, "take", take):
        run_with_parents(last, cfg)
    run_with_parents(f"evaluate-{last}", cfg)
    rows = [point.metrics for point in harness.stage_points(cfg)]
    mean, staleness_by_step = statistics.mean, [row["sync/staleness_max"] for row in rows]
    final = harness.results_of(cfg, f"evaluate-{last}")["summary"]
    return {
        "greedy": final["greedy"]["mean"],
        "avg_at_4": final["avg_at_4"]["mean"],
        "optimizer_steps": len(rows),
        "train_s": round(sum(row["time/step_s"] for row in rows), 1),
        "train_cpu_s": round(sum(row["time/cpu_s"] for row in rows), 1),
        "learner_idle_frac": round(mean(row["perf/learner_idle_frac"] for row in rows), 3),
        "staleness_max": int(max(staleness_by_step)),
        "staleness_max_mean": round(mean(staleness_by_step), 2),
        "mismatch_kl_max": max(row.get("mismatch/kl", 0.0) for row in rows),
        "mismatch_ess_min": min(row.get("mismatch/ess", 1.0) for row in rows),
        "load": round(os.getloadavg()[0], 1),  # of the whole machine
    }


def late(ahead: Ahead[Any], take: Callable[[Ahead[Any]], Any]) -> Any:
    """Return the next batch once all batches that may be sampled before its update are complete."""
    batch, thread = take(ahead), ahead._thread
    deadline = time.monotonic() + LIMIT_S
    while thread and thread.is_alive() and ahead._filled.qsize() < ahead._most:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not complete within {LIMIT_S:g} s")
        time.sleep(0.01)
    return batch


def summary(all_cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize each case over the seeds for which all its values of max_staleness are done."""
    table = []
    for case, values in CASES.items():
        by_seed: dict[int, list[dict[str, Any]]] = {}
        for cell in all_cells:
            if cell["case"] == case:
                by_seed.setdefault(cell["seed"], []).append(cell)
        seeds = sorted(seed for seed, done in by_seed.items() if len(done) == len(values))
        for staleness in values if seeds else ():
            done = [cell for seed in seeds for cell in by_seed[seed]]
            matching = [cell for cell in done if cell["max_staleness"] == staleness]
            means = {n: round(statistics.mean(cell[n] for cell in matching), 4) for n in MEANS}
            row = {"case": case, "max_staleness": staleness, "seeds": seeds}
            most = max(cell["staleness_max"] for cell in matching)
            table.append({**row, "staleness_max": most, **means})
    return table


if __name__ == "__main__":
    sys.exit(main())
