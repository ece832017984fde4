"""Close the MLflow runs that no process works on any more, with the reason.

MLflow shows a run as RUNNING until it is ended, and a killed process ends nothing. The lease
in the store shows whether a step's process lives, and why it gave up.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.config import RunConfig
from agentgym.store.lease import Tenure
from agentgym.store.runstore import RunStore, folder_name
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import LedgerError
from agentgym.tracking.reaching import LedgerUnavailable, reaching
from agentgym.tracking.step_page import MANIFEST

logger = logging.getLogger(__name__)

KINDS = ("step", "pipeline")
RECORDS = ("evaluation", "comparison", "cell")  # runs written at once, for finished work
CUT_OFF = "what it shows was not written to its end; the same command writes the rest"


@dataclass(frozen=True, slots=True)
class Death:
    """The early end of a run."""

    status: str  # MLflow's: FAILED, or KILLED if it was ended from outside
    reason: str


def close_dead(cfg: RunConfig, store: RunStore) -> dict[str, str]:
    """End every MLflow run of this store's steps that is RUNNING without a process.

    Runs of steps that this store has never seen are left alone: they belong to another store. A
    run that only records finished work, and one without a step, is closed after a lease's length.
    Result: MLflow run id -> reason. If the ledger cannot be reached, nothing is closed.
    """
    if not _may_have_running(cfg):
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
    ends: dict[str, Death | None] = {}  # pipeline's run id -> its end; None: a step of it runs
    for run in steps:
        tenure = tenures.get(_folder(run.data.tags))
        if tenure is None:
            continue
        death, parent = _death(tenure), run.data.tags.get("mlflow.parentRunId", "")
        if death is None:
            ends[parent] = None
            continue
        tracker.close_run(run.info.run_id, death.status, death.reason)
        closed[run.info.run_id] = death.reason
        step_death = Death(death.status, f"{run.data.tags.get('step', '')}: {death.reason}")
        ends.setdefault(parent, step_death)
    for run in running:
        if run.data.tags["kind"] != "pipeline":
            continue
        run_id = run.info.run_id
        end = ends[run_id] if run_id in ends else _unattended(tracker, store, run)
        if end is not None and not _builds_on(tracker, store, run):
            tracker.close_run(run_id, end.status, end.reason)
            closed[run_id] = end.reason
    for run in tracker.running(RECORDS):
        if _is_old(store, [run]):
            tracker.close_run(run.info.run_id, "KILLED", CUT_OFF)
            closed[run.info.run_id] = CUT_OFF
    return closed


def _death(tenure: Tenure) -> Death | None:
    if tenure.alive:
        return None
    return Death("KILLED" if tenure.was_interrupted else "FAILED", str(tenure))


def _unattended(tracker: Tracker, store: RunStore, run: Any) -> Death | None:
    """Return the end of a pipeline without RUNNING steps.

    None while a next step may begin, or if the run belongs to another store.
    """
    steps = _steps(tracker, run)
    if steps and not store.tenures({_folder(step.data.tags) for step in steps}):
        return None  # the run belongs to another store
    if not _is_old(store, [run, *steps]):
        return None
    return Death("KILLED", "no step of it runs; the same command goes on")


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


def _may_have_running(cfg: RunConfig) -> bool:
    """Return False if a local database has no RUNNING run or cannot be read. No MLflow import."""
    if not cfg.tracking_uri.startswith("sqlite:"):
        return True
    path = Path(cfg.tracking_uri.removeprefix("sqlite:///"))
    query = "select 1 from runs where status = 'RUNNING' and lifecycle_stage = 'active' limit 1"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            return database.execute(query).fetchone() is not None
    except sqlite3.Error:  # missing or busy: the next call looks again
        return False
