"""Check that MLflow has every committed point once and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.steps.step import Kind
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import RECORDS, delivered_seq, delivery_mark, tracker_of
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import Point
from agentgym.tracking.step_page import MANIFEST, result_points


def check_ledger(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Check in MLflow the points of the parent run (from steps with `headline`) and of each step's
    child run, the digest tags of child runs, and that there are no other child runs.
    A missing experiment or parent run is a failure. Steps that an unfinished run has not delivered
    are skipped. key: the run's key.
    """
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.fail(f"no ledger with experiment {cfg.experiment!r} at {cfg.tracking_uri}")
        return
    parents = list(tracker.runs_with({"run_key": key, "kind": "pipeline"}))
    parent = _one_run(parents, f"the run's {key[:12]}", checks)
    if parent is None:
        return
    tracked = [record for record in steps if record.points or record.final is not None]
    children = list(tracker.runs_with({"mlflow.parentRunId": parent.info.run_id}))
    if not any(record.step.kind is Kind.REPORT for record in tracked):
        # a finished step that two runs share is delivered only when this run reaches it
        there = {child.data.tags.get("step_key") for child in children}
        delivered = [
            record
            for record in tracked
            if record.key in there or delivery_mark(cfg, key, record.name, record.key).exists()
        ]
        for record in tracked:
            if record not in delivered:
                checks.skip(f"run of {record.name}", "it did not get to MLflow yet")
        tracked = delivered
    headline = [record for record in tracked if record.step.headline]
    _check_points(tracker, parent, "parent run", headline, checks)
    for record in tracked:
        runs = [child for child in children if child.data.tags.get("step_key") == record.key]
        run = _one_run(runs, record.name, checks)
        if run is not None:
            where, final, tags = f"run of {record.name}", record.final, run.data.tags
            _check_points(tracker, run, where, [record], checks)
            if final is not None:
                checks.expect(where, "tag manifest", final.digest, tags.get(MANIFEST))
                if final.follows is not None:  # else the records check reports it
                    checks.expect(where, "tag records", final.records_digest, tags.get(RECORDS))
    known = {record.key for record in steps}
    for run in children:
        if run.data.tags.get("step_key") not in known:
            checks.fail(
                f"MLflow run {run.info.run_id} ({run.data.tags.get('step')}) belongs to no commit"
                " of this run"
            )


def _check_points(
    tracker: Tracker, run: Any, where: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Compare the points of an MLflow run with the committed ones and the results of evaluations,
    with their multiplicity, and each metric's latest value in MLflow with its last point.
    where: name of the run in failures.

    In an unfinished step the commits after the last delivered one may be missing: they may still
    wait, or the run was killed while it delivered them.
    """
    history = tracker.points(run.info.run_id, run.data.metrics)
    got, tags = Counter(history), run.data.tags
    latest = {name: (step, time_ms, value) for name, step, time_ms, value in history}  # sorted
    shown = {
        metric.key: (int(metric.step), int(metric.timestamp), metric.value)
        for metric in run.data._metric_objs
    }
    for name in sorted({*latest, *shown}):
        checks.expect(where, f"latest {name}", latest.get(name), shown.get(name))
    expected: Counter[tuple[str, int, int, float]] = Counter()
    for record in steps:
        last = delivered_seq(tags, record.name, record.key)
        waiting = record.final is None
        for seq, points in sorted(record.points.items(), reverse=True):
            of_commit = _counted(points)
            waiting = waiting and (seq > last or not of_commit & got)
            expected += of_commit & got if waiting else of_commit
        if record.final is not None:
            expected += _counted(result_points(record.final))
    checks.counted += expected.total()
    for what, extra in (
        ("missing", expected - got),
        ("not of any commit, or more than once", got - expected),
    ):
        for name, step, time_ms, value in sorted(extra.elements()):
            checks.fail(f"{where}: {name} at step {step}: {value!r} (stamped {time_ms}) is {what}")


def _counted(points: Iterable[Point]) -> Counter[tuple[str, int, int, float]]:
    return Counter(
        (name, point.step, point.time_ms, value)
        for point in points
        for name, value in point.metrics.items()
    )


def existing_ledger(cfg: RunConfig) -> Tracker | None:
    """Return the MLflow tracker; None without its database or experiment: none is created."""
    uri = cfg.tracking_uri
    if uri.startswith("sqlite:") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return None
    tracker = tracker_of(cfg)
    return tracker if tracker.client.get_experiment_by_name(cfg.experiment) is not None else None


def _one_run(runs: Sequence[Any], what: str, checks: Checks) -> Any:
    checks.expect(f"MLflow run of {what}", "how many there are", 1, len(runs))
    return runs[0] if runs else None
