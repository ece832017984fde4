"""Check that a run keeps the success that it has reached: `python benchmarks/drift.py [NAME ...]`.

Every run trains once with params.yaml and the changes of a NAME in RECIPES, per seed of `--seeds`.
The weights of every fifth optimizer step play 512 items outside all lists, instead of the run's
validation, and the last ones the test items.
Runs that docs/results/drift.json contains are not repeated; that file is rewritten after each.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

from harness import config_in, kept, last_stage, parser_of, read, results_of, stage_points, write

from agentgym.compute.placement import Engine
from agentgym.config import RunConfig
from agentgym.data.items import splits_from_json
from agentgym.deploy.local import task_identities
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import finished, open_store
from agentgym.rollouts.engine import RolloutRequest
from agentgym.types import Item, Trajectory

EVERY, NUM_ITEMS = 5, 512
FIRST_ID = 1_000_000  # of items outside all lists
SUCCESS = "validation/success"
ACTOR = ("actor/ratio_kl", "actor/grad_norm", "actor/entropy", "actor/rows_with_signal_frac")
FORMER = [  # earlier values of params.yaml
    *("rollout.items_per_step=8", "horizon.max_turns=[5,8,12]", "horizon.stage_steps=[20,20,30]"),
    *("optimizer.betas=[0.9,0.95]", "optimizer.grad_clip=1.0"),
]
RECIPES = {"default": [], "former": FORMER}


def main() -> int:
    parser = parser_of(__doc__, "drift.json", seeds=range(10), state=True)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    chosen = parser.parse_args()
    result = read(chosen.out, {"runs": []})
    known = {(run["recipe"], run["seed"]) for run in result["runs"]}
    wanted = [(name, seed) for seed in chosen.seeds for name in chosen.names]
    with kept(chosen.state) as folder, ProcessPoolExecutor(chosen.parallel) as workers:
        jobs = [workers.submit(run, *case, folder) for case in wanted if case not in known]
        for job in as_completed(jobs):
            row = job.result()
            result["runs"].append(row)
            result["runs"].sort(key=lambda row: (row["recipe"], row["seed"]))
            result |= {"recipes": RECIPES, "summary": summary(result["runs"])}
            write(chosen.out, result)
            ended = f"ends {row['last']:.1%}, falls {row['fall']:.1%} at most; {row['success']}"
            print(f"{row['recipe']} seed {row['seed']}: {ended}", flush=True)
    print(result["summary"])
    return 0


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one recipe with one seed; runs of a seed share the warm start."""
    logging.disable(logging.WARNING)
    settings = (f"seed={seed}", f"validation.every={EVERY}", *RECIPES[name])
    cfg = config_in(folder / str(seed), *settings)
    last, protocol = last_stage(cfg), cfg.evaluation
    run_with_parents("warm-start", cfg, wait_s=3600)
    items = unlisted(cfg)

    def play(cfg: RunConfig, engine: Engine, _: Sequence[Item], step: int) -> list[Trajectory]:
        request = RolloutRequest(
            items,
            num_samples=1,
            step=step,
            max_turns=protocol.max_turns,
            temperature=1.0,
            seed=protocol.seed,
        )
        return engine.collect(request)

    with mock.patch("agentgym.training.rl.play_validation", play):
        run_with_parents(last, cfg, wait_s=3600)
    run_with_parents(f"evaluate-{last}", cfg, wait_s=3600)
    points = stage_points(cfg)
    played = [point for point in points if SUCCESS in point.metrics]
    success = [round(point.metrics[SUCCESS], 4) for point in played]
    peaks = itertools.accumulate(success, max)
    final = results_of(cfg, f"evaluate-{last}")["summary"]
    return {
        "recipe": name,
        "seed": seed,
        "steps": [point.step for point in played],
        "success": success,
        "fall": round(max(peak - last for peak, last in zip(peaks, success, strict=True)), 4),
        "last": final["avg_at_4"]["mean"],
        "greedy": final["greedy"]["mean"],
        "train_cpu_s": round(sum(point.metrics["time/cpu_s"] for point in points), 1),
        **{
            metric: [round(point.metrics.get(metric, 0.0), 5) for point in points]
            for metric in ACTOR
        },
    }


def unlisted(cfg: RunConfig) -> list[Item]:
    """Return items outside all lists whose world differs from every test item's."""
    store = open_store(cfg)
    splits = splits_from_json(store.read(finished(cfg, store)["prepare"], "splits.json"))
    (env,) = cfg.envs
    ids = list(range(FIRST_ID, FIRST_ID + 2 * NUM_ITEMS))
    tested = [item.task_id for item in splits.test]
    known = task_identities(env, tested + ids)
    tested_worlds = set(known[: len(tested)])
    worlds = zip(ids, known[len(tested) :], strict=True)
    fresh = [task for task, world in worlds if world not in tested_worlds]
    return [Item(env.name, task, "validation") for task in fresh[:NUM_ITEMS]]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    table = {}
    for name in sorted({run["recipe"] for run in runs}):
        recipe_runs = [run for run in runs if run["recipe"] == name]
        last = [run["last"] for run in recipe_runs]
        table[name] = {
            "seeds": len(recipe_runs),
            "last_mean": round(statistics.mean(last), 4),
            "last_least": round(min(last), 4),
            "falls": sorted(round(run["fall"], 4) for run in recipe_runs),
            "train_cpu_s": round(statistics.mean(run["train_cpu_s"] for run in recipe_runs), 1),
        }
    return table


if __name__ == "__main__":
    raise SystemExit(main())
