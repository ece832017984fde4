"""Check what MLflow shows of runs in addition to their points: names, states, tags, parameters,
descriptions and files are made again by the functions that delivered them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.history import FOLDER
from agentgym.steps.step import Kind
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import (
    PACKAGES,
    RECORDS,
    delivery_tags,
    run_tags,
    run_title,
)
from agentgym.tracking.mlflow import Tracker, flat_params, local_path, pipeline_name
from agentgym.tracking.points import raised
from agentgym.tracking.saved_view import tags_of_experiment
from agentgym.tracking.step_data import OF_MACHINE, OURS
from agentgym.tracking.step_page import (
    MANIFEST,
    TABLE,
    is_evaluated,
    note_of_pipeline,
    note_of_step,
    note_tags,
    table_of,
    table_tags,
)
from envs.plain import plain

NAME = "mlflow.runName"
ELSEWHERE = (MANIFEST, RECORDS)  # tags that the ledger check compares
FOREIGN = "nothing of this run writes it"


def check_step_run(
    store: RunStore, record: StepRecord, parent: Any, run: Any, checks: Checks
) -> None:
    """Check tags, status, parameters and files of the MLflow run of a finished step."""
    final = record.final
    assert final is not None
    where, evaluated = f"run of {record.name}", is_evaluated(final)
    tags = {
        "mlflow.parentRunId": parent.info.run_id,
        "step": record.name,
        "step_key": record.key,
        "kind": "step",
        NAME: record.step.title,
        **_delivered(record, run),
        **(table_tags([TABLE]) if evaluated else {}),
        **note_tags(note_of_step(final, record.step.title)),
    }
    _check_tags(where, run, tags, checks)
    _check_ended(where, run, checks)
    _check_params(where, run, final.config, checks)
    files = {TABLE: table_of(store, final)} if evaluated else {}
    _check_files(where, run, files, (), checks)


def check_parent_run(
    cfg: RunConfig,
    store: RunStore,
    tracker: Tracker,
    key: str,
    steps: Sequence[StepRecord],
    run: Any,
    checks: Checks,
) -> None:
    """Check tags, parameters and files of the pipeline's MLflow run, and its status if it ended.

    steps: those that have an MLflow run of their own.
    """
    where = "parent run"
    name = pipeline_name(run_title(cfg), key)
    tags = {"run_key": key, "kind": "pipeline", NAME: name, **run_tags(cfg, key)}
    for record in steps:
        if record.step.headline:
            tags |= _delivered(record, run)
    report = next((record.final for record in steps if record.step.kind is Kind.REPORT), None)
    files = {}
    if report is not None:
        note = note_of_pipeline(cfg, tracker, report, key, run.info.run_id)
        tags |= note_tags(note)
        files = {name: store.read(report, name) for name in (*report.blobs, *report.records)}
        _check_ended(where, run, checks)
    _check_tags(where, run, tags, checks)
    experiment = tracker.client.get_experiment(tracker.experiment_id).tags
    for name, text in tags_of_experiment({}, tracker.experiment).items():
        if experiment.get(name) != text:
            checks.skip(f"tag {name} of the experiment", "a user changed it, as any user may")
    _check_params(where, run, cfg.semantic(), checks)
    # the decisions check compares the files of this store's decisions
    _check_files(where, run, files, (FOLDER,), checks)


def _delivered(record: StepRecord, run: Any) -> dict[str, str]:
    """Return the tags that the delivery of a step set on a run.

    If an alarm was raised several times, its tag may show any of these. An unfinished step may have
    delivered any of its commits.
    """
    there = run.data.tags
    points = [point for of_commit in record.points.values() for point in of_commit]
    tags = delivery_tags(record.commits[-1], points)
    if record.final is None:
        tags = {name: there[name] for name in tags if name in there}
    for alarm, _ in raised(points):
        name, text = f"alarm.{alarm.name}", plain(str(alarm))
        tags |= {name: text} if there.get(name) == text else {}
    return tags


def _check_tags(where: str, run: Any, tags: Mapping[str, str], checks: Checks) -> None:
    there, wanted = run.data.tags, {name: plain(text) for name, text in {**OURS, **tags}.items()}
    checks.expect(where, "name", wanted[NAME], run.info.run_name)
    for name, text in wanted.items():
        checks.expect(where, f"tag {name}", text, there.get(name))
    for name in sorted(there.keys() - wanted.keys() - {*ELSEWHERE}):
        if name in OF_MACHINE:
            checks.skip(f"tag {name} of a run", "it describes the machine that ran it")
        else:
            checks.skip(f"tag {name} of the {where}", FOREIGN)


def _check_ended(where: str, run: Any, checks: Checks) -> None:
    checks.expect(where, "status", "FINISHED", run.info.status)
    checks.skip("when a run began and ended", "clocks are pinned, not proven")


def _check_params(where: str, run: Any, params: Mapping[str, Any], checks: Checks) -> None:
    wanted, there = flat_params(params), run.data.params
    for name in sorted({*wanted, *there}):
        checks.expect(where, f"parameter {name}", wanted.get(name), there.get(name))


def _check_files(
    where: str, run: Any, wanted: Mapping[str, bytes], folders: Sequence[str], checks: Checks
) -> None:
    """Compare an MLflow run's artifacts with `wanted`; other files in `folders` are ignored."""
    root = local_path(run.info.artifact_uri)
    if root is None:
        checks.skip(
            f"files of the {where}", "its artifact store is on another machine", bool(wanted)
        )
        return
    there = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    for name, data in wanted.items():
        same = name in there and there[name].read_bytes() == data
        checks.expect(where, f"{name}, made again", True, same)
    for name in sorted(there.keys() - wanted.keys()):
        if name == PACKAGES:
            checks.skip(f"{PACKAGES} of the {where}", "it describes the machine that ran it")
        elif name.split("/")[0] not in folders:
            checks.skip(f"file {name} of the {where}", FOREIGN)
