"""Which MLflow run a step's numbers belong to, and bringing them there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.data import data_digest
from agentgym.store.manifest import Manifest
from agentgym.store.posix import RunStore
from agentgym.tracking import Tracker, deliver_committed


@cache
def _tracker(uri: str, experiment: str, artifact_root: Path) -> Tracker:
    return Tracker(uri, experiment, artifact_root)


def tracker_of(cfg: RunConfig) -> Tracker:
    """The configured ledger; one client per process."""
    return _tracker(cfg.tracking_uri, cfg.tracking.experiment, (cfg.state_dir / "mlflow-artifacts").resolve())


def parent_run(cfg: RunConfig, run_key: str) -> str:
    """The MLflow run of this configuration; found or created."""
    tags = {
        "algorithm": cfg.algorithm.recipe,
        "environment": cfg.env.name,
        "horizon": ",".join(map(str, cfg.horizon.max_turns)),
        "seed": str(cfg.seed),
        "data.sha256": data_digest(cfg.data.path, cfg.env.name),
    }
    title = f"{cfg.algorithm.recipe} {'>'.join(map(str, cfg.horizon.max_turns))} seed {cfg.seed}"
    return tracker_of(cfg).parent_run(run_key, params=cfg.semantic(), tags=tags, title=title)


def child_run(cfg: RunConfig, parent_id: str, manifest: Manifest, title: str) -> str:
    """The run of one step below it."""
    return tracker_of(cfg).child_run(parent_id, title, manifest.key, params=manifest.config, tags={"step": manifest.step})


def deliver_step(cfg: RunConfig, store: RunStore, manifest: Manifest, run_key: str, *, title: str, headline: bool) -> None:
    """Points up to the last commit, on the step's run and, for headline steps, on the parent; a finished step ends its run."""
    tracker = tracker_of(cfg)
    parent_id = parent_run(cfg, run_key)
    child_id = child_run(cfg, parent_id, manifest, title)
    deliver_committed(tracker, store, manifest.step, manifest.key, [child_id, *([parent_id] if headline else [])])
    if manifest.done:
        tracker.set_tags(child_id, {"manifest": manifest.digest})
        tracker.end_run(child_id)
        if manifest.step == "report":
            tracker.end_run(parent_id)
