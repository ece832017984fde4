"""Check that an adapter learns the default task: `python benchmarks/lora.py [--seeds 0 1 2]`.

Each seed trains with params.yaml, except for an adapter of CHANGES on the warm start's weights.
The last adapter then plays the test items greedily, once separate from the frozen weights and once
merged into them, as every engine gets it: both must choose the same actions.
Writes docs/results/lora.json after each seed; seeds that it contains are not repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import config_in, last_stage, parser_of, read, write

from agentgym.config import RunConfig
from agentgym.data.items import splits_from_json
from agentgym.deploy.environment import environment_servers
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import ADAPTER, WEIGHTS, files_of
from agentgym.models.checkpoint import OPTIMIZER, Checkpoint, adapter_of, load_checkpoint
from agentgym.models.model import set_threads
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import finished, open_store
from agentgym.rollouts.engine import RolloutRequest, open_engine
from agentgym.steps.step import stages
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.types import Item

CHANGES = ["lora.rank=16", "lora.alpha=32", "optimizer.lr=0.002"]
PATIENCE = [  # long timeouts for a busy machine; they change no result
    *("rollout.episode_timeout_s=3600", "env.request_timeout_s=1800"),
    *("env.session_ttl_s=3600", "env.start_timeout_s=1800"),
]


def main() -> int:
    chosen = parser_of(__doc__, "lora.json", seeds=(0, 1, 2)).parse_args()
    set_threads()
    known = read(chosen.out, {})
    runs = known["runs"] if known.get("changes") == CHANGES else []
    for seed in sorted(set(chosen.seeds) - {run["seed"] for run in runs}):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(seed, Path(folder)))
        result = {"changes": CHANGES, "verdict": verdict(runs), "runs": runs}
        write(chosen.out, result)
        print(f"seed {seed}: {result['verdict']}", flush=True)
    return 0 if verdict(runs)["ok"] else 1


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Check that each seed's gain is significant and each adapter acts as its merged weights."""
    played = [run["greedy"] for run in runs]
    same = all(greedy["same"] == greedy["items"] for greedy in played)
    return {
        "ok": same and all(run["gain"]["low"] > 0 for run in runs),
        "start": [round(100 * run["start"]["mean"], 1) for run in runs],
        "end": [round(100 * run["end"]["mean"], 1) for run in runs],
        "items": min(greedy["items"] for greedy in played),
        "actions": sum(greedy["actions"] for greedy in played),
    }


def run(seed: int, state: Path) -> dict[str, Any]:
    cfg = config_in(state, f"seed={seed}", *CHANGES, *PATIENCE)
    last = last_stage(cfg)
    run_with_parents(f"evaluate-{last}", cfg, wait_s=3600)
    store = open_store(cfg)
    completed = finished(cfg, store)
    before, after = (completed[f"evaluate-{name}"].results for name in ("warm-start", last))
    trained, base = completed[last], completed["warm-start"]
    return {
        "seed": seed,
        "start": before["summary"]["avg_at_4"],
        "end": after["summary"]["avg_at_4"],
        "gain": after["paired"]["avg_at_4"],
        "greedy": compared(cfg, store, trained, completed["prepare"]),
        "bytes": {
            "weights": size_of(base, WEIGHTS),
            "their_optimizer": size_of(resumable(store, base), OPTIMIZER),
            "adapter": size_of(trained, ADAPTER),
            "its_optimizer": size_of(resumable(store, trained), OPTIMIZER),
        },
        "train_s": round(sum(completed[s.name].timings["wall_s"] for s in stages(cfg.horizon)), 1),
    }


def resumable(store: RunStore, manifest: Manifest) -> Manifest:
    """Return a step's newest commit with the optimizer's state: the last one may have none."""
    history = store.history(manifest.step, manifest.key)
    return [commit for commit in history if files_of(commit, OPTIMIZER)][-1]


def size_of(manifest: Manifest, name: str) -> int:
    return sum(manifest.blobs[file].size for file in files_of(manifest, name))


def compared(cfg: RunConfig, store: RunStore, trained: Manifest, data: Manifest) -> dict[str, Any]:
    """Play all test items greedily with the adapter and with its merged weights; compare."""
    items = splits_from_json(store.read(data, "splits.json")).test[: cfg.evaluation.num_items]
    merged, adapter = load_checkpoint(store, trained), adapter_of(store, trained)
    assert adapter is not None
    plan = LearnerPlan(merged.architecture, adapter.policy, cfg.optimizer, 1, adapter=adapter)
    separate = replace(merged, weights=plan.build().model)
    pairs = [actions(cfg, checkpoint, items) for checkpoint in (separate, merged)]
    return {
        "items": len(items),
        "actions": sum(map(len, pairs[1])),
        "same": sum(one == other for one, other in zip(*pairs, strict=True)),
    }


def actions(cfg: RunConfig, checkpoint: Checkpoint, items: Sequence[Item]) -> list[list[str]]:
    with (
        environment_servers(cfg, False) as endpoints,
        open_engine(cfg, checkpoint, endpoints, version=0) as engine,
    ):
        request = RolloutRequest(
            items,
            num_samples=1,
            step=0,
            max_turns=cfg.evaluation.max_turns,
            temperature=0.0,
            seed=cfg.evaluation.seed,
        )
        played = engine.collect(request)
    return [[turn.action for turn in trajectory.turns] for trajectory in played]


if __name__ == "__main__":
    raise SystemExit(main())
