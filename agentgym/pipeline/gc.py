"""Garbage collection of steps that no recent run, no pointer of DVC and no registry needs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.evaluation.history import STEP as PROMOTIONS
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.pipeline.stored_config import AUDITS
from agentgym.pipeline.stored_config import STEP as RUNS
from agentgym.pipeline.table import begun, open_store
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.reaching import LedgerUnavailable, reaching

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
    """Return every step of the store with its reason to be kept, if any; oldest first.
    pointers: folder of DVC's pointers.

    Errors: ConfigError if the dataset is missing; ManifestError.
    """
    store = open_store(cfg)
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
            **{head.digest: "of this run" for head in begun(cfg, store).values()},
        },
        live={digest for holder in store.holders() for digest in holder.parents},
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


def _pointed_at(folder: Path) -> dict[str, str]:
    """Return digest -> reason to keep it, for each digest that a pointer in `folder` names."""
    reasons = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            digest = str(json.loads(path.read_bytes())["manifest"][0]["digest"])
            reasons[digest] = f"named by {path}"
        except (ValueError, LookupError, TypeError):
            continue  # a file of metrics, or not from DVC
    return reasons


def _registered(cfg: RunConfig, heads: Sequence[Manifest]) -> dict[str, str]:
    """Return digest -> reason for each registration, unless MLflow answers that it has no such
    version; without an answer the registration is kept.
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
    """Tag the step's MLflow runs as collected; if MLflow is not reached, log a warning."""
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            query = f"tags.step_key = '{head.key}'"
            for run in tracker.client.search_runs([tracker.experiment_id], filter_string=query):
                tracker.set_tags(run.info.run_id, COLLECTED)
    except LedgerUnavailable as error:
        logger.warning("MLflow does not say that %s was collected: %s", head.step, error)


def told(rows: Sequence[Survey]) -> Mapping[str, int]:
    """Return the counts `steps`, `kept` and `collectable`, and `collectable_bytes`."""
    garbage = [row for row in rows if not row.reason]
    return {
        "steps": len(rows),
        "kept": len(rows) - len(garbage),
        "collectable": len(garbage),
        "collectable_bytes": sum(row.num_bytes for row in garbage),
    }


DAY_S = 86_400.0
FRESH_S = 3_600.0


def kept(
    heads: Sequence[Manifest],
    *,
    now: float,
    days: float,
    runs: int,
    pinned: Mapping[str, str],
    live: Collection[str],
) -> dict[str, str]:
    """Return digest -> reason for each head that is needed, itself or for a step that builds on it.

    now: seconds since 1970.
    days: younger heads are needed.
    runs: number of newest leaves (heads that nothing builds on) to keep.
    pinned: digest -> reason.
    live: digests that running steps build on.
    Live heads, and those committed within the last hour (their run may be between two steps), keep
    every head connected with them, because only the run knows what else it needs.
    """
    by_digest = {head.digest: head for head in heads}
    reasons: dict[str, str] = {}
    parent_digests = {parent for head in heads for parent in head.parents.values()}
    leaves = [head for head in heads if head.digest not in parent_digests]
    leaves.sort(key=lambda head: head.created_at)
    for head in heads:
        if head.digest in pinned:
            reasons[head.digest] = pinned[head.digest]
        elif (now - head.created_at) / DAY_S < days:
            reasons[head.digest] = f"younger than {days:g} days"
    for head in leaves[max(0, len(leaves) - runs) :]:
        reasons.setdefault(head.digest, f"one of the {runs} newest ends of runs")
    fresh = {head.digest for head in heads if now - head.created_at < FRESH_S}
    for digest in connected(heads, fresh.union(live)):
        reasons.setdefault(digest, "connected with a step that runs now, or did an hour ago")
    waiting = list(reasons)
    while waiting:
        head = by_digest[waiting.pop()]
        for parent in head.parents.values():
            if parent in by_digest and parent not in reasons:
                reasons[parent] = f"{head.step} ({head.key[:12]}) builds on it"
                waiting.append(parent)
    return reasons


def connected(heads: Sequence[Manifest], digests: Iterable[str]) -> set[str]:
    """Return the digests of all heads that are linked with one of `digests`, directly or through
    other heads; these digests are included. A head is linked with each of its parents. Digests
    that belong to no head are ignored.
    """
    neighbours: dict[str, set[str]] = {head.digest: set() for head in heads}
    for head in heads:
        for parent in head.parents.values():
            if parent in neighbours:
                neighbours[parent].add(head.digest)
                neighbours[head.digest].add(parent)
    component, waiting = set(), [digest for digest in digests if digest in neighbours]
    while waiting:
        digest = waiting.pop()
        if digest not in component:
            component.add(digest)
            waiting += neighbours[digest]
    return component
