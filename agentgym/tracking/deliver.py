"""Delivery of a step's metrics to its MLflow run, and the end of runs that no process works on.

MLflow shows a run as RUNNING until it is ended, and a killed process ends nothing. The lease in the
store shows whether a step's process lives, and why it gave up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentgym.config import RunConfig
from agentgym.data.trajectories import input_digest
from agentgym.defaults import VIEWER_PORT
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.runstore import RunStore, folder_name
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import SPOOL, Alarm, LedgerError, Point, begun, decode_points, raised
from agentgym.tracking.reaching import (
    SUPERSEDED,
    LedgerUnavailable,
    first_row,
    has_file,
    ledger_identity,
    reaching,
)
from agentgym.tracking.step_data import packages
from agentgym.tracking.step_page import (
    MANIFEST,
    describe,
    note_of_comparison,
    note_of_pipeline,
    result_points,
    show_step,
    table_tags,
)

logger = logging.getLogger(__name__)

DELIVERED = "mlflow.agentgym.delivered"  # tag prefix: a step's last commit that MLflow has
RECORDS = "mlflow.agentgym.records"  # tag of a step's run: its last commit's `records_digest`
PACKAGES = "packages.txt"  # artifact of a pipeline's run: the installed packages
SHARE = 0.01  # maximum share of a run's time for deliveries
MAX_WAIT_S = 60.0  # maximum age of the newest points in MLflow
CURVE = (  # the main metrics, which `curve` returns; MLflow has all
    "sft/loss",
    "rollout/max_turns",
    "rollout/success",
    "validation/success",
    "rollout/turns_mean",
    "rollout/env_error_frac",
    "mismatch/kl",
    "eval/greedy",
    "eval/pass_at_1",
    "eval/coverage",
)
End = tuple[str, str]  # (status: FAILED, or KILLED for a process ended from outside; reason)
WRITTEN_AT_ONCE = ("evaluation", "comparison", "cell")  # kinds of runs, for finished work
RUNNING = "select 1 from runs where status = 'RUNNING' and lifecycle_stage = 'active' limit 1"
CUT_OFF = "what it shows was not written to its end; the same command writes the rest"


_tracker = cache(Tracker)


class StaleRun(LedgerError):
    """Error for an MLflow run with points of commits that the store no longer has."""


def tracker_of(cfg: RunConfig) -> Tracker:
    """Return the tracker of the configured MLflow experiment, one per process."""
    artifact_root = (cfg.state_dir / "mlflow-artifacts").resolve()
    return _tracker(cfg.tracking_uri, cfg.experiment, artifact_root)


def parent_run(cfg: RunConfig, run_key: str) -> str:
    """Find or create the pipeline's run in MLflow, see `Tracker.parent_run`. Return its id."""
    return tracker_of(cfg).parent_run(
        run_key, params=cfg.semantic(), tags=run_tags(cfg, run_key), title=run_title(cfg)
    )


def run_title(cfg: RunConfig) -> str:
    """Return the title of a pipeline's run: recipe, horizon and seed."""
    return f"{cfg.algorithm.recipe} {'>'.join(map(str, cfg.horizon.max_turns))} seed {cfg.seed}"


def run_tags(cfg: RunConfig, run_key: str) -> dict[str, str]:
    """Return the tags that describe a pipeline's run, for example its recipe and its seed."""
    return {
        "algorithm": cfg.algorithm.recipe,
        "environment": cfg.env_names,
        "horizon": ",".join(map(str, cfg.horizon.max_turns)),
        "seed": str(cfg.seed),
        "data.sha256": input_digest(cfg),
        "episodes": episodes_page(run_key),
    }


def episodes_page(run_key: str, step: str = "") -> str:
    """Return the address of a run's episodes, or of a step's, in `agentgym view`."""
    stage = f"&stage={step}" if step else ""
    return f"http://127.0.0.1:{VIEWER_PORT}/episodes?run=r{run_key[:12]}{stage}"


def child_run(cfg: RunConfig, parent_id: str, manifest: Manifest, title: str) -> str:
    """Find or create a step's MLflow run, named `title`, below `parent_id`. Return its id."""
    return tracker_of(cfg).child_run(
        parent_id, title, manifest.key, params=manifest.config, tags={"step": manifest.step}
    )


def step_run(cfg: RunConfig, run_key: str, manifest: Manifest, title: str) -> tuple[str, str]:
    """Return (experiment id, run id) of a step; create missing runs.
    Errors: LedgerUnavailable; LedgerError if the experiment was deleted.
    """
    with reaching(cfg.tracking_uri):
        parent_id = parent_run(cfg, run_key)
        return tracker_of(cfg).experiment_id, child_run(cfg, parent_id, manifest, title)


def curve(store: RunStore, manifest: Manifest) -> list[dict[str, float | None]]:
    """Return a row per point of a step: `step`, and each of CURVE with `_` for `/`.
    Values have four significant digits; None: not measured.
    """
    rows = []
    for point in committed_points(store, manifest.step, manifest.key):
        values = {key.replace("/", "_"): point.metrics.get(key) for key in CURVE}
        short = {key: None if v is None else float(f"{v:.4g}") for key, v in values.items()}
        rows.append({"step": point.step, **short})
    return rows


def committed_points(store: RunStore, step: str, key: str) -> list[Point]:
    """Return the points of all commits of a step with this key, in order."""
    return [point for commit in store.history(step, key) for point in _points(store, commit)]


def committed_alarms(store: RunStore, trained: Iterable[Manifest]) -> list[Alarm]:
    """Return the alarms that begin a trouble; see `raised`. trained: stages, in training order."""
    return begun(point for s in trained for point in committed_points(store, s.step, s.key))


class Paced:
    """Callable that calls `deliver` with a step's commits, in about SHARE of the time.

    A commit in the pause after a delivery, up to MAX_WAIT_S, is left to the next delivery, unless
    it is the step's last. If MLflow is unavailable, a warning is logged; the next delivery includes
    the commit.
    """

    def __init__(self, deliver: Callable[[Manifest], None]) -> None:
        self._deliver = deliver
        self._not_before = 0.0

    def __call__(self, manifest: Manifest) -> None:
        began = time.monotonic()
        if began < self._not_before and not manifest.done:
            return
        try:
            self._deliver(manifest)
        except LedgerUnavailable as error:
            logger.warning("metrics wait in the store: %s", error)
        ended = time.monotonic()
        self._not_before = ended + min((ended - began) / SHARE, MAX_WAIT_S)


def deliver_step(
    cfg: RunConfig,
    store: RunStore,
    manifest: Manifest,
    run_key: str,
    *,
    title: str,
    headline: bool,
    is_report: bool,
) -> None:
    """Deliver a step's points to its run, named `title`, and with `headline` to the pipeline's run.

    Missing runs are created. If a run is stale, a warning is logged, the pipeline's run is ended as
    superseded, and new runs are created.
    A finished step's run gets its page and ends. With `is_report` the pipeline's run then gets the
    step's files, the list of packages and a description, and ends, too. Errors: LedgerUnavailable.
    """
    with reaching(cfg.tracking_uri):
        tracker = tracker_of(cfg)
        parent_id = parent_run(cfg, run_key)
        child_id = child_run(cfg, parent_id, manifest, title)
        try:
            run_ids = [child_id, parent_id] if headline else [child_id]
            deliver_committed(tracker, store, manifest.step, manifest.key, run_ids)
        except StaleRun as stale:
            logger.warning(
                "%s; its pipeline is set aside there (tag kind=%s) and written again as a new run",
                stale,
                SUPERSEDED,
            )
            # the other steps are delivered when next confirmed: `ledger_identity` has changed
            tracker.supersede(parent_id)
            deliver_step(
                cfg, store, manifest, run_key, title=title, headline=headline, is_report=is_report
            )
            return
        if manifest.done:
            digests = {MANIFEST: manifest.digest, RECORDS: manifest.records_digest}
            tracker.set_tags(child_id, digests)
            points, runs = _points(store, manifest), (parent_id, child_id)
            if result := result_points(manifest):
                for run_id in run_ids:
                    tracker.deliver(run_id, result)
            show_step(cfg, store, tracker, manifest, points, runs, title)
            tracker.end_run(child_id)
            if is_report:
                names = (*manifest.blobs, *manifest.records)
                files = {name: store.read(manifest, name) for name in names}
                tracker.log_artifacts(parent_id, {**files, PACKAGES: packages()})
                note = note_of_pipeline(cfg, tracker, manifest, run_key, parent_id)
                describe(tracker, parent_id, note)
                tracker.end_run(parent_id)


@dataclass(frozen=True, slots=True)
class CellPoints:
    """A cell of a comparison: one of the compared runs, with the points to copy to its own run."""

    title: str
    cfg: RunConfig
    run_key: str
    tags: Mapping[str, str]
    points: Sequence[Point]


def deliver_comparison(
    name: str,
    key: str,
    cells: Sequence[CellPoints],
    files: Mapping[str, bytes],
    params: Mapping[str, Any],
    numbers: Point,
) -> None:
    """Deliver a comparison: a run with its numbers and files, and below it a run per cell.

    The run of each cell's pipeline is created if missing, tagged with the comparison, and ended.
    key: identifies the comparison's run. cells: at least one; the first one's settings are used.
    files: NAME.md among them becomes the description.
    A delivery of these files to this ledger that the state folder records is skipped. Repeats
    change nothing.
    """
    cfg = cells[0].cfg
    digests = [sha256(f"{path} ".encode() + data) for path, data in sorted(files.items())]
    content = sha256("".join(digests).encode())
    mark = cfg.state_dir / "delivered" / f"comparison-{key[:16]}"
    identity = ledger_identity(cfg)
    if identity and mark.is_file() and mark.read_text(encoding="utf-8") == f"{content} {identity}":
        return
    tracker = tracker_of(cfg)
    identity_tags = {"comparison_key": key, "kind": "comparison"}
    title = f"{name} {key[:8]}"
    comparison_id = tracker.find_or_create(title, identity_tags, params, {"comparison": name})
    for cell in cells:
        run_id = parent_run(cell.cfg, cell.run_key)
        tracker.set_tags(run_id, {f"comparison.{name}": key[:12]})
        cell_tags = {**cell.tags, "run": f"r{cell.run_key[:12]}", "run_id": run_id}
        # a copy: the run may belong to several comparisons, and MLflow allows it only one parent
        identity_tags = {"mlflow.parentRunId": comparison_id, "cell": cell.title, "kind": "cell"}
        cell_id = tracker.find_or_create(cell.title, identity_tags, cell.cfg.semantic(), cell_tags)
        tracker.deliver(cell_id, cell.points)
        tracker.end_run(cell_id)
        tracker.end_run(run_id)  # a later report of this run continues it under its id
    tracker.deliver(comparison_id, [numbers], table_tags(files))
    tracker.log_artifacts(comparison_id, files)
    note = note_of_comparison(comparison_id, files[f"{name}.md"].decode(), files)
    describe(tracker, comparison_id, note)
    tracker.end_run(comparison_id)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{content} {ledger_identity(cfg)}", encoding="utf-8")


def deliver_committed(
    tracker: Tracker, store: RunStore, step: str, key: str, run_ids: Sequence[str]
) -> int:
    """Write the points of a step's commits to the runs that lack them, up to the last commit.

    Result: the number of commits delivered, for the run that lacked the most. A tag on each run,
    written after the points, names the last one.
    Errors: StaleRun if a run names commits that the store does not have.
    """
    delivered = 0
    for run_id in run_ids:
        last = _parse_mark(tracker.client.get_run(run_id).data.tags.get(_tag(step, key), ""))
        pending = store.history(step, key, after=last[0] - 1)
        if last[0] >= 0:
            if not pending or _mark(pending[0]) != last:
                raise StaleRun(
                    f"MLflow run {run_id} holds points of commits of {step} that the store no"
                    " longer has"
                )
            pending = pending[1:]
        if not pending:
            continue
        points = [point for manifest in pending for point in _points(store, manifest)]
        tracker.deliver(run_id, points, delivery_tags(pending[-1], points))
        delivered = max(delivered, len(pending))
    return delivered


def delivery_tags(last: Manifest, points: Sequence[Point]) -> dict[str, str]:
    """Return the tags to set after delivery of these points: each alarm, and the commit `last`."""
    alarm_tags = {f"alarm.{alarm.name}": str(alarm) for alarm, _ in raised(points)}
    return {**alarm_tags, _tag(last.step, last.key): " ".join(map(str, _mark(last)))}


def delivery_mark(cfg: RunConfig, run_key: str, step: str, key: str) -> Path:
    """Return the path of the file that records that a run's step was delivered to MLflow."""
    return cfg.state_dir / "delivered" / run_key[:16] / f"{step}-{key[:16]}"


def delivered_steps(cfg: RunConfig) -> dict[str, set[tuple[str, str]]]:
    """Return the steps of each run that have a delivery mark in the state folder.

    Result: first 16 digits of the run's key -> set of (step's name, first 16 digits of its key).
    MLflow is not asked; it may have lost these steps since.
    """
    steps_by_run: dict[str, set[tuple[str, str]]] = {}
    for mark in sorted((cfg.state_dir / "delivered").glob("*/*-*")):
        step, _, key = mark.name.rpartition("-")
        steps_by_run.setdefault(mark.parent.name, set()).add((step, key))
    return steps_by_run


def delivered_seq(tags: Mapping[str, str], step: str, key: str) -> int:
    """Return the number of the step's last commit that was delivered to an MLflow run; -1 if none.
    tags: the tags of that run.
    """
    return _parse_mark(tags.get(_tag(step, key), ""))[0]


def _tag(step: str, key: str) -> str:
    return f"{DELIVERED}.{step}-{key[:16]}"


def _points(store: RunStore, manifest: Manifest) -> list[Point]:
    return decode_points(store.read(manifest, SPOOL)) if SPOOL in manifest.records else []


def _mark(manifest: Manifest) -> tuple[int, str]:
    """Return a commit's number and time; numbers start again at 0 in a folder that was deleted."""
    return manifest.seq, repr(manifest.created_at)


def _parse_mark(text: str) -> tuple[int, str]:
    seq, _, created_at = text.partition(" ")
    return (int(seq), created_at) if seq.isdigit() else (-1, "")


def close_dead(cfg: RunConfig, store: RunStore) -> dict[str, str]:
    """End every MLflow run of this store's steps that is RUNNING without a process.

    Runs of kinds WRITTEN_AT_ONCE, of any store, and pipelines without a RUNNING step are ended only
    once they are older than a lease lasts.
    Result: MLflow run id -> reason. If the ledger fails, a warning is logged and the result is {}.
    """
    if has_file(cfg) and first_row(cfg, RUNNING) is None:
        return {}
    try:
        with reaching(cfg.tracking_uri):
            return _close(tracker_of(cfg), store)
    except (LedgerUnavailable, LedgerError) as error:
        logger.warning("MLflow may show runs as RUNNING that are not: %s", error)
        return {}


def _close(tracker: Tracker, store: RunStore) -> dict[str, str]:
    steps, pipelines = (tracker.running((kind,)) for kind in ("step", "pipeline"))
    tenures = store.tenures({_folder(run.data.tags) for run in steps})
    closed: dict[str, str] = {}
    ends: dict[str, End | None] = {}  # pipeline's run id -> its end; None: a step of it runs
    for run in steps:
        tenure = tenures.get(_folder(run.data.tags))
        if tenure is None:
            continue
        parent = run.data.tags.get("mlflow.parentRunId", "")
        if tenure.alive:
            ends[parent] = None
            continue
        status, reason = "KILLED" if tenure.was_interrupted else "FAILED", str(tenure)
        tracker.close_run(run.info.run_id, status, reason)
        closed[run.info.run_id] = reason
        ends.setdefault(parent, (status, f"{run.data.tags.get('step', '')}: {reason}"))
    for run in pipelines:
        run_id = run.info.run_id
        end = ends[run_id] if run_id in ends else _unattended(tracker, store, run)
        if end is not None and not _builds_on(tracker, store, run):
            tracker.close_run(run_id, *end)
            closed[run_id] = end[1]
    for run in tracker.running(WRITTEN_AT_ONCE):
        if _is_old(store, [run]):
            tracker.close_run(run.info.run_id, "KILLED", CUT_OFF)
            closed[run.info.run_id] = CUT_OFF
    return closed


def _unattended(tracker: Tracker, store: RunStore, run: Any) -> End | None:
    """Return (status, reason) to end the run of a pipeline without a RUNNING step with; None if it
    is recent or of another store.
    """
    steps = _steps(tracker, run)
    if steps and not store.tenures({_folder(step.data.tags) for step in steps}):
        return None  # the run belongs to another store
    if not _is_old(store, [run, *steps]):
        return None
    return "KILLED", "no step of it runs; the same command goes on"


def _is_old(store: RunStore, runs: Sequence[Any]) -> bool:
    """Return True if the last begin or end of these runs is longer ago than a lease lasts."""
    last_ms = max(max(run.info.end_time or 0, run.info.start_time or 0) for run in runs)
    return time.time() - last_ms / 1000 >= store.lease_ttl_s


def _builds_on(tracker: Tracker, store: RunStore, run: Any) -> bool:
    """Return True if a step with a live lease, which MLflow may not know yet, builds on a step of
    this pipeline's run.
    """
    live = {digest for holder in store.holders() for digest in holder.parents}
    digests = {step.data.tags.get(MANIFEST, "") for step in _steps(tracker, run)}
    return bool(digests & live)


def _steps(tracker: Tracker, run: Any) -> list[Any]:
    parent = {"mlflow.parentRunId": run.info.run_id}
    return list(tracker.runs_with(parent, run.info.experiment_id))


def _folder(tags: Mapping[str, str]) -> str:
    return folder_name(tags.get("step", "none"), tags.get("step_key", ""))
