"""Cost and gain of rollouts ahead of the updates: `python benchmarks/staleness.py [--seeds 0 1]`.

Runs the default task, with the changes in BUDGET, at each `rollout.max_staleness`, one after
another under each seed: unchanged, and with a learner so slow that each batch reaches the maximal
staleness. Before, a run four updates ahead is killed at random moments and must learn from every
item once.
Cells that docs/results/staleness.json contains are not repeated; that file is rewritten after each.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import harness

from agentgym.audit import audit
from agentgym.config import RunConfig
from agentgym.data.check import load_data
from agentgym.data.items import train_stream
from agentgym.defaults import set_process_defaults
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.training.ahead import Ahead

CASES = {
    "as it is": (0, 1, 4),
    "slow learner": (1, 4),  # at 0 a slow learner changes nothing
}
BUDGET = ("horizon.stage_steps=[6,6,8]", "evaluation.num_items=256")
# settings of the run that is killed
KILLED = ("horizon.max_turns=[5,8]", "horizon.stage_steps=[8,8]", "rollout.items_per_step=8")
FAR = "rollout.max_staleness=4"
LIMIT_S = 3600.0  # per run
MEANS = ("avg_at_4", "greedy", "train_s", "train_cpu_s", "learner_idle_frac")

CHILD = """
import sys
from agentgym.config import load_config
from agentgym.pipeline.run import run_with_parents
cfg = load_config(overrides=sys.argv[1:])
import agentgym.training.rl
print("begins", flush=True)
run_with_parents("stage-2", cfg)
"""


def main() -> int:
    parser = harness.parser_of(__doc__, "staleness.json", seeds=(0, 1), state=True)
    parser.add_argument("--kills", type=int, default=6)
    chosen = parser.parse_args()
    os.chdir(harness.ROOT)
    set_process_defaults()
    result = harness.read(chosen.out, {"cells": []})
    result["settings"] = BUDGET
    with harness.kept(chosen.state) as folder:
        if "killed" not in result:
            result["killed"] = killed(folder / "killed", chosen.kills)
            harness.write(chosen.out, result)
            print(result["killed"])
        for case, seed, staleness in cells(chosen.seeds):
            key = {"case": case, "seed": seed, "max_staleness": staleness}
            if any(key.items() <= cell.items() for cell in result["cells"]):
                continue
            result["cells"].append(key | run(case, seed, staleness, folder))
            result["summary"] = summary(result["cells"])
            harness.write(chosen.out, result)
            print(result["cells"][-1], flush=True)
    return 0 if result["killed"]["each_item_once"] and result["killed"]["audit"] else 1


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


def killed(folder: Path, kills: int) -> dict[str, Any]:
    """Kill a run four updates ahead at random moments of its training, and restart it each time."""
    settings = [*KILLED, FAR, "store.max_mib_per_minute=0"]
    cfg = harness.config_in(folder, *settings)
    settings.append(f"store.path={folder}/store")
    run_with_parents("warm-start", cfg)
    rng, durable, ahead = random.Random(0), [0], []  # noqa: S311  (kill times, no secrets)
    while len(ahead) < kills:
        wanted = durable[-1] + rng.randint(1, 2)
        process = started(settings)

        def reached(wanted: int = wanted, process: Any = process) -> bool:
            return durable_step(cfg) >= wanted or process.poll() is not None

        harness.wait_for(reached, LIMIT_S, f"step {wanted} was not reached")
        time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        if process.wait(LIMIT_S) == 0:
            break  # the run ended before all kills were done
        durable.append(durable_step(cfg))
        last = max(stage_heads(cfg), key=lambda head: int(head.state["global_step"]))
        ahead.append(len(last.state["ahead"]))
    if code := started(settings).wait(LIMIT_S):
        raise RuntimeError(f"the run after the kills ended with code {code}")
    commits = harness.stage_commits(cfg)
    consumed = [item for commit in commits for item in commit.state["consumed"]]
    stream = [item.item_id for item in train_stream(cfg, load_data(cfg), {}).next(len(consumed))]
    staleness_by_step = [point.metrics["sync/staleness_max"] for point in harness.stage_points(cfg)]
    return {
        "settings": [*KILLED, FAR],
        "kills": len(ahead),
        "durable_step_after_each": durable[1:],
        "batches_ahead_at_each": ahead,  # per the last commit; they were sampled again
        "optimizer_steps": len(commits),
        "items": len(consumed),
        "each_item_once": consumed == stream and len(set(consumed)) == len(consumed),
        "staleness_max": int(max(staleness_by_step)),
        "audit": audit(cfg, num_episodes=8).ok,
    }


def started(settings: list[str]) -> subprocess.Popen[bytes]:
    """Start a run of both stages; return it once it is about to begin."""
    command = [sys.executable, "-c", CHILD, *settings]
    process = subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def stage_heads(cfg: RunConfig) -> list[Manifest]:
    return [head for head in open_store(cfg).heads() if head.step.startswith("stage")]


def durable_step(cfg: RunConfig) -> int:
    return max((int(head.state["global_step"]) for head in stage_heads(cfg)), default=0)


if __name__ == "__main__":
    sys.exit(main())
