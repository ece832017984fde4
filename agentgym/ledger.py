"""Which MLflow run a step's numbers belong to, and bringing them there."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from functools import cache
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.data import data_digest
from agentgym.store.manifest import Manifest
from agentgym.store.posix import RunStore
from agentgym.tracking import SPOOL, SUPERSEDED, StaleRun, Tracker, decode_points, deliver_committed

logger = logging.getLogger(__name__)

CURVE = (  # what a person looks at first; everything else is in MLflow
    "sft/loss",
    "rollout/max_turns",
    "rollout/success",
    "validation/success",
    "rollout/turns_mean",
    "rollout/env_error_frac",
    "mismatch/kl",
    "eval/greedy",
    "eval/pass_at_1",
)


@cache
def _tracker(uri: str, experiment: str, artifact_root: Path) -> Tracker:
    return Tracker(uri, experiment, artifact_root)


def tracker_of(cfg: RunConfig) -> Tracker:
    """The configured ledger; one client per process."""
    return _tracker(cfg.tracking_uri, cfg.tracking.experiment, (cfg.state_dir / "mlflow-artifacts").resolve())


def ledger_identity(cfg: RunConfig) -> str:
    """Another text where the ledger is another one, also at the same place, and after a run was deleted or set aside in it.

    Empty where none can be seen. Spares MLflow's import.
    """
    place = f"{cfg.tracking_uri} {cfg.tracking.experiment}"
    if not cfg.tracking_uri.startswith("sqlite:"):
        return place
    path = Path(cfg.tracking_uri.removeprefix("sqlite:///"))
    query = """
        select experiment_id, creation_time, (select count(*) from runs where lifecycle_stage = 'deleted'),
            (select count(*) from tags where key = 'kind' and value = ?)
        from experiments where name = ?"""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute(query, (SUPERSEDED, cfg.tracking.experiment)).fetchone()
    except sqlite3.Error:  # not there, or busy: the long way finds out
        return ""
    return f"{place} {row}" if row else ""


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


def step_run(cfg: RunConfig, run_key: str, manifest: Manifest, title: str) -> tuple[str, str]:
    """(experiment id, run id) of a step in MLflow, for a link to it."""
    return tracker_of(cfg).experiment_id, child_run(cfg, parent_run(cfg, run_key), manifest, title)


def curve(store: RunStore, manifest: Manifest) -> list[dict[str, float | None]]:
    """A step's main metrics, a row per point: {"step": 3, "rollout_success": 0.25, ...}; None where a metric was not measured."""
    commits = [commit for commit in store.history(manifest.step, manifest.key) if SPOOL in commit.records]
    points = [point for commit in commits for point in decode_points(store.read(commit, SPOOL))]
    return [{"step": point.step, **{key.replace("/", "_"): _short(point.metrics.get(key)) for key in CURVE}} for point in points]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def deliver_step(cfg: RunConfig, store: RunStore, manifest: Manifest, run_key: str, *, title: str, headline: bool) -> None:
    """Points up to the last commit, on the step's run and, for headline steps, on the parent; a finished step ends its run."""
    tracker = tracker_of(cfg)
    parent_id = parent_run(cfg, run_key)
    child_id = child_run(cfg, parent_id, manifest, title)
    try:
        deliver_committed(tracker, store, manifest.step, manifest.key, [child_id, *([parent_id] if headline else [])])
    except StaleRun as stale:
        logger.warning("%s; its pipeline is set aside there (tag kind=%s) and written again as a new run", stale, SUPERSEDED)
        tracker.supersede(parent_id)  # the other steps follow when they are confirmed: it is another ledger now
        deliver_step(cfg, store, manifest, run_key, title=title, headline=headline)
        return
    if manifest.done:
        tracker.set_tags(child_id, {"manifest": manifest.digest})
        tracker.end_run(child_id)
        if manifest.step == "report":
            tracker.log_artifacts(parent_id, {name: store.read(manifest, name) for name in (*manifest.blobs, *manifest.records)})
            tracker.end_run(parent_id)
