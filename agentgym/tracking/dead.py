"""Close the MLflow runs that no process works on any more, with the reason: MLflow shows a run as
RUNNING until it is ended, and a killed process ends nothing. The store's lease tells who lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.config import RunConfig
from agentgym.store.runstore import RunStore, folder_name
from agentgym.tracking.deliver import first_row, has_file, tracker_of
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import LedgerError
from agentgym.tracking.reaching import LedgerUnavailable, reaching
from agentgym.tracking.step_page import MANIFEST

logger = logging.getLogger(__name__)

KINDS = ("step", "pipeline")
End = tuple[str, str]  # status in MLflow, FAILED, or KILLED if ended from outside; the reason
RECORDS = ("evaluation", "comparison", "cell")  # runs written at once, for finished work
RUNNING = "select 1 from runs where status = 'RUNNING' and lifecycle_stage = 'active' limit 1"
CUT_OFF = "what it shows was not written to its end; the same command writes the rest"


def close_dead(cfg: RunConfig, store: RunStore) -> dict[str, str]:
    """End every MLflow run of this store's steps that is RUNNING without a process.

    A run that only records finished work, and one without a step, is closed after a lease's length.
    Result: MLflow run id -> reason. If the ledger cannot be reached, nothing is closed.
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
    running = tracker.running(KINDS)
    steps = [run for run in running if run.data.tags["kind"] == "step"]
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
    for run in running:
        if run.data.tags["kind"] != "pipeline":
            continue
        run_id = run.info.run_id
        end = ends[run_id] if run_id in ends else _unattended(tracker, store, run)
        if end is not None and not _builds_on(tracker, store, run):
            tracker.close_run(run_id, *end)
            closed[run_id] = end[1]
    for run in tracker.running(RECORDS):
        if _is_old(store, [run]):
            tracker.close_run(run.info.run_id, "KILLED", CUT_OFF)
            closed[run.info.run_id] = CUT_OFF
    return closed


def _unattended(tracker: Tracker, store: RunStore, run: Any) -> End | None:
    """Return the end of a pipeline without RUNNING steps; None while a next step may begin."""
    steps = _steps(tracker, run)
    if steps and not store.tenures({_folder(step.data.tags) for step in steps}):
        return None  # the run belongs to another store
    if not _is_old(store, [run, *steps]):
        return None
    return "KILLED", "no step of it runs; the same command goes on"


def _is_old(store: RunStore, runs: Sequence[Any]) -> bool:
    """Return True if these runs last began or ended at least a lease's length ago."""
    last_ms = max(max(run.info.end_time or 0, run.info.start_time or 0) for run in runs)
    return time.time() - last_ms / 1000 >= store.lease_ttl_s


def _builds_on(tracker: Tracker, store: RunStore, run: Any) -> bool:
    """Return True if a live step that MLflow does not know yet builds on a result of this run."""
    live = {digest for holder in store.holders() for digest in holder.parents}
    digests = {step.data.tags.get(MANIFEST, "") for step in _steps(tracker, run)}
    return bool(digests & live)


def _steps(tracker: Tracker, run: Any) -> list[Any]:
    query = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    return list(tracker.client.search_runs([run.info.experiment_id], filter_string=query))


def _folder(tags: Mapping[str, str]) -> str:
    return folder_name(tags.get("step", "none"), tags.get("step_key", ""))
