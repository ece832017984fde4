"""Garbage collection of a store: steps that neither the configured run nor its neighbours, DVC's
pointers or the registry need.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.evaluation.history import STEP as PROMOTIONS
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.pipeline.audited import STEP as AUDITS
from agentgym.pipeline.runs import STEP as RUNS
from agentgym.pipeline.table import finished, key_of, open_store, steps_of
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest
from agentgym.store.retention import kept
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.mlflow import LedgerUnavailable, reaching

logger = logging.getLogger(__name__)

FOR_EVER = {
    EVALUATION: "an evaluation",
    PROMOTIONS: "the history of an alias",
    AUDITS: "an audit that was kept",
}
COLLECTED = {"store": "collected"}  # tag of the MLflow runs of steps that are gone


@dataclass(frozen=True, slots=True)
class Survey:
    """A step of the store, and the reason to keep it."""

    head: Manifest
    num_bytes: int
    reason: str  # why it is kept; empty: it can be collected


def survey(cfg: RunConfig, pointers: Path) -> list[Survey]:
    """Return every step of the store, oldest first. pointers: folder of DVC's pointers.

    Errors: ConfigError if the dataset is missing; ManifestError.
    """
    store = open_store(cfg)
    live = {digest for holder in store.holders() for digest in holder.parents}
    heads = store.heads()
    reasons = kept(
        # a stored configuration is not the end of a run
        [head for head in heads if head.step != RUNS],
        now=time.time(),
        days=cfg.store.gc_keep_days,
        runs=cfg.store.gc_keep_runs,
        pinned={
            **_registered(cfg, heads),
            **_pointed_at(pointers),
            **{head.digest: FOR_EVER[head.step] for head in heads if head.step in FOR_EVER},
            **dict.fromkeys(_configured(cfg, store), "of the configured run"),
        },
        live=live,
    )
    reasons |= {head.digest: "what a run was asked for" for head in heads if head.step == RUNS}
    return [Survey(head, store.num_bytes(head), reasons.get(head.digest, "")) for head in heads]


def collect(cfg: RunConfig, garbage: Sequence[Manifest]) -> Iterator[Manifest]:
    """Remove these steps, newest first because later steps build on earlier ones, and tag their
    MLflow runs. Earlier collections that were killed are finished.

    Yield each step once it is removed. A step that runs or has a newer commit is left.
    """
    store = open_store(cfg)
    store.finish_collecting()
    for head in sorted(garbage, key=lambda manifest: -manifest.created_at):
        try:
            store.collect(head)
        except (LeaseHeld, ValueError) as error:
            logger.warning("%s: left as it is: %s", head.step, error)
            continue
        _tell_ledger(cfg, head)
        yield head


def _configured(cfg: RunConfig, store: RunStore) -> list[str]:
    """Digests of this configuration's steps in the store, done or in progress."""
    done = finished(cfg, store)
    begun = [
        store.head(name, key_of(step, cfg, done))
        for name, step in steps_of(cfg).items()
        if name not in done and all(parent in done for parent in step.parents)
    ]
    return [head.digest for head in (*done.values(), *begun) if head is not None]


def _pointed_at(folder: Path) -> dict[str, str]:
    """Return digest -> reason, for each digest that a pointer names."""
    reasons = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            reasons[str(json.loads(path.read_bytes())["manifest"][0]["digest"])] = (
                f"named by {path}"
            )
        except (ValueError, LookupError, TypeError):
            continue  # a file of metrics, or not from DVC
    return reasons


def _registered(cfg: RunConfig, heads: Sequence[Manifest]) -> dict[str, str]:
    """Return digest -> reason, for each registration whose model version exists.

    If MLflow cannot be reached, the version counts as existing.
    """
    reasons = {}
    for head in heads:
        if {"model", "version"} <= head.results.keys():
            name, version = str(head.results["model"]), str(head.results["version"])
            if _has_version(cfg, name, version):
                reasons[head.digest] = f"registered as {name} version {version}"
    return reasons


def _has_version(cfg: RunConfig, name: str, version: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        with reaching(cfg.tracking_uri):
            tracker_of(cfg).client.get_model_version(name, version)
    except MlflowException as error:
        return str(error.error_code) != "RESOURCE_DOES_NOT_EXIST"
    except LedgerUnavailable:
        return True
    return True


def _tell_ledger(cfg: RunConfig, head: Manifest) -> None:
    """Set a tag on the step's MLflow runs, so that people see that its weights are gone."""
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            query = f"tags.step_key = '{head.key}'"
            for run in tracker.client.search_runs([tracker.experiment_id], filter_string=query):
                tracker.set_tags(run.info.run_id, COLLECTED)
    except LedgerUnavailable as error:
        logger.warning("MLflow does not say that %s was collected: %s", head.step, error)


def told(rows: Sequence[Survey]) -> Mapping[str, int]:
    """Return the numbers of steps, of kept and of collectable ones, and the collectable bytes."""
    garbage = [row for row in rows if not row.reason]
    return {
        "steps": len(rows),
        "kept": len(rows) - len(garbage),
        "collectable": len(garbage),
        "collectable_bytes": sum(row.num_bytes for row in garbage),
    }
