"""What rollouts ahead of the updates cost and save: `python benchmarks/staleness.py [--seeds 0 1]`.

The default task, over BUDGET, at each `rollout.max_staleness`, one after another under each seed:
as it is, and with a learner so slow that each batch is as old as may be. Before, a run four updates
ahead is killed at random moments and must learn from every item once.
Seconds with slow environments are in benchmarks/rollouts.py.
Cells that docs/results/staleness.json has are not run again; that file is rewritten after each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

from cadence import durable_step
from pipeline import ROOT, machine

from agentgym.audit import audit
from agentgym.config import RunConfig, load_config
from agentgym.data.check import load_data
from agentgym.data.items import train_stream
from agentgym.defaults import set_process_defaults
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import finished, open_store
from agentgym.rollouts.horizon import stages
from agentgym.steps.context import METRICS
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import decode_points
from agentgym.training.ahead import Ahead

OUT = ROOT / "docs/results/staleness.json"
CASES = {
    "as it is": (0, 1, 4),
    "slow learner": (1, 4),  # 0 is as it is
}
BUDGET = ("horizon.stage_steps=[6,6,8]", "evaluation.num_items=256")
# of the run that is killed
KILLED = ("horizon.max_turns=[5,8]", "horizon.stage_steps=[8,8]", "rollout.items_per_step=8")
FAR = "rollout.max_staleness=4"
MEANS = ("avg_at_4", "greedy", "train_s", "train_cpu_s", "learner_idle_frac")
LIMIT_S = 3600.0  # of one run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--state", help="folder that keeps the runs (default: a temporary one)")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    set_process_defaults()
    result = (
        json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {"cells": []}
    )
    result |= {
        "machine": machine(),
        "command": "python benchmarks/staleness.py",
        "settings": BUDGET,
    }
    with tempfile.TemporaryDirectory() as folder:
        state = chosen.state or folder
        if "killed" not in result:  # first: it forks, which only a process without threads may
            result["killed"] = killed(Path(state, "killed"), chosen.kills)
            chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"{result['killed']}\n")
        for case, seed, staleness in cells(chosen.seeds):
            key = {"case": case, "seed": seed, "max_staleness": staleness}
            if any(key.items() <= cell.items() for cell in result["cells"]):
                continue
            result["cells"].append(key | run(case, seed, staleness, Path(state)))
            result["summary"] = summary(result["cells"])
            chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"{result['cells'][-1]}\n")
            sys.stdout.flush()
    return 0 if result["killed"]["each_item_once"] and result["killed"]["audit"] else 1


def cells(seeds: list[int]) -> list[tuple[str, int, int]]:
    """In an order in which no value of max_staleness is always first."""
    return [
        (case, seed, staleness)
        for number, seed in enumerate(seeds)
        for case, values in CASES.items()
        for staleness in values[:: -1 if number % 2 else 1]
    ]


def run(case: str, seed: int, staleness: int, folder: Path) -> dict[str, Any]:
    """The stages, and what the last weights do on the test items."""
    own, base = folder / f"{case}-{seed}".replace(" ", "-"), folder / f"base-{seed}"
    settings = [*BUDGET, f"seed={seed}"]
    if not own.exists():
        run_with_parents(
            "evaluate-warm-start", load_config(overrides=[*settings, f"store.path={base}/store"])
        )
        shutil.copytree(base, own)
    cfg = load_config(
        overrides=[*settings, f"store.path={own}/store", f"rollout.max_staleness={staleness}"]
    )
    spans = [stage.name for stage in stages(cfg.horizon)]
    take = partialmethod(late, Ahead.take) if case == "slow learner" else Ahead.take
    with mock.patch.object(Ahead, "take", take):
        run_with_parents(spans[-1], cfg)
    run_with_parents(f"evaluate-{spans[-1]}", cfg)
    rows = [row for commit in history(cfg, spans) for row in metrics_of(cfg, commit)]
    mean, most = statistics.mean, [row["sync/staleness_max"] for row in rows]
    final = finished(cfg, open_store(cfg))[f"evaluate-{spans[-1]}"].results["summary"]
    return {
        "greedy": final["greedy"]["mean"],
        "avg_at_4": final["avg_at_4"]["mean"],
        "optimizer_steps": len(rows),
        "train_s": round(sum(row["time/step_s"] for row in rows), 1),
        "train_cpu_s": round(sum(row["time/cpu_s"] for row in rows), 1),
        "learner_idle_frac": round(mean(row["perf/learner_idle_frac"] for row in rows), 3),
        "staleness_max": int(max(most)),
        "staleness_max_mean": round(mean(most), 2),
        "mismatch_kl_max": max(row.get("mismatch/kl", 0.0) for row in rows),
        "mismatch_ess_min": min(row.get("mismatch/ess", 1.0) for row in rows),
        "load": round(os.getloadavg()[0], 1),  # of the machine, others' programs too
    }


def late(ahead: Ahead[Any], take: Callable[[Ahead[Any]], Any]) -> Any:
    """The next batch, once all are complete that may be sampled before it is learned from."""
    batch, thread = take(ahead), ahead._thread
    deadline = time.monotonic() + LIMIT_S
    while thread and thread.is_alive() and ahead._filled.qsize() < ahead._most:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not complete within {LIMIT_S:g} s")
        time.sleep(0.01)
    return batch


def history(cfg: RunConfig, names: list[str]) -> list[Manifest]:
    store, done = open_store(cfg), finished(cfg, open_store(cfg))
    return [each for name in names for each in store.history(name, done[name].key)]


def metrics_of(cfg: RunConfig, commit: Manifest) -> list[dict[str, float]]:
    return [point.metrics for point in decode_points(open_store(cfg).read(commit, METRICS))]


def summary(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case, over the seeds that all of its values of max_staleness have."""
    table = []
    for case, values in CASES.items():
        own = [cell for cell in done if cell["case"] == case]
        seeds = [
            seed
            for seed in sorted({cell["seed"] for cell in own})
            if sum(cell["seed"] == seed for cell in own) == len(values)
        ]
        for staleness in values if seeds else ():
            of_it = [c for c in own if c["max_staleness"] == staleness and c["seed"] in seeds]
            table.append(
                {
                    "case": case,
                    "max_staleness": staleness,
                    "seeds": seeds,
                    "staleness_max": max(cell["staleness_max"] for cell in of_it),
                    **{
                        name: round(statistics.mean(cell[name] for cell in of_it), 4)
                        for name in MEANS
                    },
                }
            )
    return table


def killed(folder: Path, kills: int) -> dict[str, Any]:
    """A run four updates ahead, killed at random moments of its training and started again."""
    cfg = load_config(
        overrides=[*KILLED, FAR, "store.max_mib_per_minute=0", f"store.path={folder / 'store'}"]
    )
    ended(started("warm-start", cfg))
    chance, durable, ahead = random.Random(0), [0], []  # noqa: S311  (moments, no secrets)
    while len(ahead) < kills:
        wanted = durable[-1] + chance.randint(1, 2)
        process, deadline = started("stage-2", cfg), time.monotonic() + LIMIT_S
        while durable_step(cfg) < wanted and process.is_alive():
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {wanted} was not reached within {LIMIT_S:g} s")
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 2.0))
        process.kill()
        process.join(LIMIT_S)
        if process.exitcode == 0:
            break  # it was over before all kills were done
        durable.append(durable_step(cfg))
        heads = [each for each in open_store(cfg).heads() if each.step.startswith("stage")]
        last = max(heads, key=lambda each: int(each.state["global_step"]))
        ahead.append(len(last.state["ahead"]))
    ended(started("stage-2", cfg))
    commits = history(cfg, [stage.name for stage in stages(cfg.horizon)])
    consumed = [item for commit in commits for item in commit.state["consumed"]]
    stream = [item.item_id for item in train_stream(cfg, load_data(cfg), {}).next(len(consumed))]
    seen = [row["sync/staleness_max"] for each in commits for row in metrics_of(cfg, each)]
    return {
        "settings": [*KILLED, FAR],
        "kills": len(ahead),
        "durable_step_after_each": durable[1:],
        "batches_ahead_at_each": ahead,  # by the last commit; they were generated again
        "optimizer_steps": len(commits),
        "items": len(consumed),
        "each_item_once": consumed == stream and len(set(consumed)) == len(consumed),
        "staleness_max": int(max(seen)),
        "audit": audit(cfg, num_episodes=8).ok,
    }


def started(step: str, cfg: RunConfig) -> Any:
    """A process that brings a step and all before it to their end."""
    process = multiprocessing.get_context("fork").Process(target=run_with_parents, args=(step, cfg))
    process.start()
    return process


def ended(process: Any) -> None:
    process.join(LIMIT_S)
    if process.exitcode != 0:
        raise RuntimeError(f"a run ended with code {process.exitcode} (limit {LIMIT_S:g} s)")


if __name__ == "__main__":
    sys.exit(main())
