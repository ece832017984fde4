"""Does an adapter learn the default task: `python benchmarks/lora.py [--seeds 0 1 2]`.

Each seed trains as params.yaml says, but an adapter of CHANGES on the warm start's weights.
The last adapter then plays the test items greedily as it is, beside the frozen weights, and merged
into them, as every engine gets it: both must say the same actions.
Writes docs/results/lora.json after each seed; those that are in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import ROOT, machine

from agentgym.config import RunConfig, load_config
from agentgym.data.items import splits_from_json
from agentgym.deploy.environment import environment_servers
from agentgym.learner.plan import LearnerPlan
from agentgym.models.checkpoint import (
    ADAPTER,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    adapter_of,
    load_checkpoint,
)
from agentgym.models.model import set_threads
from agentgym.models.tensorfiles import files_of
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import finished, open_store
from agentgym.rollouts.engine import open_engine
from agentgym.rollouts.horizon import stages
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.types import Item

OUT = ROOT / "docs/results/lora.json"
CHANGES = ["lora.rank=16", "lora.alpha=32", "optimizer.lr=0.002"]
PATIENCE = [  # with a busy machine; nothing depends on it but whether a seed comes to its end
    "rollout.episode_timeout_s=3600",
    "env.request_timeout_s=1800",
    "env.session_ttl_s=3600",
    "env.start_timeout_s=1800",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    set_threads()
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {}
    runs = known["runs"] if known.get("changes") == CHANGES else []
    for seed in [each for each in chosen.seeds if each not in {run["seed"] for run in runs}]:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(seed, Path(folder)))
        result = {
            "machine": machine(),
            "command": "python benchmarks/lora.py",
            "changes": CHANGES,
            "verdict": verdict(runs),
            "runs": runs,
        }
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"seed {seed}: {result['verdict']}\n")
        sys.stdout.flush()
    return 0 if verdict(runs)["ok"] else 1


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether each seed's gain over its warm start is beyond its interval, and each adapter acts
    as its merged weights do.
    """
    return {
        "ok": all(
            run["gain"]["low"] > 0 and run["greedy"]["same"] == run["greedy"]["items"]
            for run in runs
        ),
        "start": [round(100 * run["start"]["mean"], 1) for run in runs],
        "end": [round(100 * run["end"]["mean"], 1) for run in runs],
        "items": min(run["greedy"]["items"] for run in runs),
        "actions": sum(run["greedy"]["actions"] for run in runs),
    }


def run(seed: int, state: Path) -> dict[str, Any]:
    own = [f"seed={seed}", f"store.path={state / 'store'}"]
    cfg = load_config(ROOT / "params.yaml", [*own, *CHANGES, *PATIENCE])
    last = stages(cfg.horizon)[-1].name
    run_with_parents(f"evaluate-{last}", cfg, wait_s=3600)
    store = open_store(cfg)
    done = finished(cfg, store)
    before, after = (done[f"evaluate-{name}"].results for name in ("warm-start", last))
    trained, base = done[last], done["warm-start"]
    return {
        "seed": seed,
        "start": before["summary"]["avg_at_4"],
        "end": after["summary"]["avg_at_4"],
        "gain": after["paired"]["avg_at_4"],
        "greedy": compared(cfg, store, trained, done["prepare"]),
        "bytes": {
            "weights": size_of(base, WEIGHTS),
            "their_optimizer": size_of(resumable(store, base), OPTIMIZER),
            "adapter": size_of(trained, ADAPTER),
            "its_optimizer": size_of(resumable(store, trained), OPTIMIZER),
        },
        "train_s": round(
            sum(done[stage.name].timings["wall_s"] for stage in stages(cfg.horizon)), 1
        ),
    }


def resumable(store: RunStore, manifest: Manifest) -> Manifest:
    """The newest commit of a step that holds the optimizer's state: the last one need not."""
    history = store.history(manifest.step, manifest.key)
    return [each for each in history if files_of(each, OPTIMIZER)][-1]


def size_of(manifest: Manifest, name: str) -> int:
    return sum(manifest.blobs[file].size for file in files_of(manifest, name))


def compared(cfg: RunConfig, store: RunStore, trained: Manifest, data: Manifest) -> dict[str, Any]:
    """Greedy episodes of all test items, of the adapter and of its merged weights."""
    items = splits_from_json(store.read(data, "splits.json")).test[: cfg.evaluation.num_items]
    merged = load_checkpoint(store, trained)
    beside = actions(cfg, unmerged(store, trained, merged), items)
    ours = actions(cfg, merged, items)
    return {
        "items": len(items),
        "actions": sum(map(len, ours)),
        "same": sum(one == other for one, other in zip(beside, ours, strict=True)),
    }


def unmerged(store: RunStore, trained: Manifest, merged: Checkpoint) -> Checkpoint:
    """A checkpoint whose model has the adapter's layers beside the frozen weights."""
    adapter = adapter_of(store, trained)
    assert adapter is not None
    optimizer = load_config(ROOT / "params.yaml").optimizer
    plan = LearnerPlan(merged.architecture, adapter.policy, optimizer, 1, adapter=adapter)
    return replace(merged, weights=plan.build().model)


def actions(cfg: RunConfig, checkpoint: Checkpoint, items: Sequence[Item]) -> list[list[str]]:
    """What each greedy episode did, turn by turn."""
    with (
        environment_servers(cfg, False) as endpoints,
        open_engine(cfg, checkpoint, endpoints, version=0) as engine,
    ):
        played = engine.collect(
            items,
            num_samples=1,
            step=0,
            max_turns=cfg.evaluation.max_turns,
            temperature=0.0,
            seed=cfg.evaluation.seed,
        )
    return [[turn.action for turn in each.turns] for each in played]


if __name__ == "__main__":
    raise SystemExit(main())
