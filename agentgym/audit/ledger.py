"""MLflow against the store: every committed point once, nothing else, and the checkpoint under
its name.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agentgym.audit.report import Checks
from agentgym.audit.steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.publish import headline_tags
from agentgym.models.adapter import MergedTensors
from agentgym.models.checkpoint import policy_digest, policy_of
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import RECORDS, delivered_seq, delivery_mark, tracker_of
from agentgym.tracking.mlflow import Tracker, local_path
from agentgym.tracking.pages import MANIFEST
from agentgym.tracking.registry import FILES, ModelChanged, fetch_version, version_tags


def check_ledger(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """The parent run has the points of headline steps, each child those of its step; there are
    no other children.
    """
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.fail(f"no ledger with experiment {cfg.experiment!r} at {cfg.tracking_uri}")
        return
    parents = list(runs_with(tracker, {"run_key": key, "kind": "pipeline"}))
    parent = _one_run(parents, f"the run's {key[:12]}", checks)
    if parent is None:
        return
    tracked = [record for record in steps if record.points or record.final is not None]
    children = list(runs_with(tracker, {"mlflow.parentRunId": parent.info.run_id, "kind": "step"}))
    if not any(record.step.kind is Kind.REPORT for record in tracked):
        come = [record for record in tracked if _has_come_to(cfg, key, record, children)]
        checks.skipped += len(tracked) - len(come)
        tracked = come
    headline = [record for record in tracked if record.step.headline]
    _check_points(tracker, parent, "parent run", headline, checks)
    for record in tracked:
        own = [each for each in children if each.data.tags.get("step_key") == record.key]
        run = _one_run(own, record.name, checks)
        if run is not None:
            _check_points(tracker, run, f"run of {record.name}", [record], checks)
            if record.final is not None:
                checks.expect(
                    f"run of {record.name}",
                    "tag manifest",
                    record.final.digest,
                    run.data.tags.get(MANIFEST),
                )
                if record.final.follows is not None:  # else the records check says so
                    checks.expect(
                        f"run of {record.name}",
                        "tag records",
                        record.final.records_digest,
                        run.data.tags.get(RECORDS),
                    )
    _check_artifacts(store, parent.info.artifact_uri, steps, checks)
    known = {record.key for record in steps}
    for run in children:
        if run.data.tags.get("step_key") not in known:
            checks.fail(
                f"MLflow run {run.info.run_id} ({run.data.tags.get('step')}) belongs to no commit"
                " of this run"
            )


def _has_come_to(cfg: RunConfig, run_key: str, record: StepRecord, children: Sequence[Any]) -> bool:
    """Whether a run that goes on has brought a step to MLflow, by its runs there or by what is
    noted here; a step that another run did for it, too, is confirmed when it gets there.
    """
    if delivery_mark(cfg, run_key, record.name, record.key).exists():
        return True
    return any(child.data.tags.get("step_key") == record.key for child in children)


def _check_artifacts(
    store: RunStore, location: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """The report that people open in MLflow is the committed one."""
    report = next(
        (each.final for each in steps if each.step.kind is Kind.REPORT and each.final is not None),
        None,
    )
    if report is None:
        return
    folder = local_path(location)
    if folder is None:
        checks.skipped += 1  # on a remote artifact store
        return
    for name in (*report.blobs, *report.records):
        path = folder / name
        try:
            same = path.read_bytes() == store.read(report, name)
        except (LookupError, ValueError, OSError) as error:
            checks.fail(f"parent run: {name} cannot be compared: {error}")
            continue
        checks.expect("parent run", f"{name} as in report commit {report.seq}", True, same)


def _check_points(
    tracker: Tracker, run: Any, where: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Point by point; counted, so that one delivered twice is one too many. run: MLflow's.
    Of an unfinished step, the commits after the last one that is known to be delivered may still
    wait for it, or were under way when the run was killed.
    """
    got, tags = Counter(tracker.points(run.info.run_id, run.data.metrics)), run.data.tags
    expected: Counter[tuple[str, int, int, float]] = Counter()
    for record in steps:
        last = delivered_seq(tags, record.name, record.key)
        waiting = record.final is None
        for seq, points in sorted(record.points.items(), reverse=True):
            of_commit = Counter(
                (name, point.step, point.time_ms, value)
                for point in points
                for name, value in point.metrics.items()
            )
            waiting = waiting and (seq > last or not of_commit & got)
            expected += of_commit & got if waiting else of_commit
    checks.counted += expected.total()
    for what, extra in (
        ("missing", expected - got),
        ("not of any commit, or more than once", got - expected),
    ):
        for name, step, time_ms, value in sorted(extra.elements()):
            checks.fail(f"{where}: {name} at step {step}: {value!r} (stamped {time_ms}) is {what}")


def check_registry(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    record = next((each for each in steps if each.step.kind is Kind.REGISTER), None)
    if record is None or record.final is None or record.checkpoint is None:
        return
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.skipped += 1  # the ledger's check has said so
        return
    from mlflow.exceptions import MlflowException

    registered, checkpoint = record.final.results, record.checkpoint
    name, number = str(registered["model"]), str(registered["version"])
    where = f"{name} version {number}"
    try:
        version = tracker.client.get_model_version(name, number)
    except MlflowException as error:
        checks.fail(f"{where}: {error.message}")
        return
    wanted = {"step_key": checkpoint.digest, "weights.sha256": policy_digest(checkpoint)}
    if version.tags.get("run_key") == key:
        evaluation = record.parents[record.step.evaluation]
        wanted |= {"evaluation": evaluation.digest, **headline_tags(evaluation)}
    else:
        # another run reached the same checkpoint and speaks of its own evaluation
        checks.skipped += 1
    for tag, value in wanted.items():
        checks.expect(where, f"tag {tag}", value, version.tags.get(tag))
    _check_registered_weights(tracker, store, version, checkpoint, where, checks)
    _check_files(tracker, name, number, where, checks)


def _check_files(tracker: Tracker, name: str, number: str, where: str, checks: Checks) -> None:
    """What people load is what was registered, file by file."""
    if FILES not in version_tags(tracker, name, number):
        checks.skipped += 1  # it was registered before versions had digests
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            fetch_version(tracker, name, number, Path(folder))
        except (LookupError, ModelChanged) as error:
            checks.fail(f"{where}: {error}")
            return
    checks.counted += 1


def _check_registered_weights(
    tracker: Tracker,
    store: RunStore,
    version: Any,
    checkpoint: Manifest,
    where: str,
    checks: Checks,
) -> None:
    """The model people load, not what its tags say of it."""
    from safetensors.torch import load_file

    location = (
        tracker.client.get_logged_model(version.model_id).artifact_location
        if version.model_id
        else version.source
    )
    folder = local_path(str(location))
    if folder is None:
        checks.skipped += 1  # on a remote artifact store
        return
    try:
        stored = policy_of(store, checkpoint)
        ours = stored.load()
        theirs = load_file(folder / "model" / "model.safetensors")
    except (LookupError, ValueError, OSError) as error:
        checks.fail(f"{where}: weights cannot be compared: {error}")
        return
    # merged once more here, where sums may be of another order
    rounding = 4 * torch.finfo(stored.dtype).eps if isinstance(stored, MergedTensors) else 0.0
    for tensor in sorted(ours):
        near = rounding * float(ours[tensor].abs().max())
        same = tensor in theirs and bool(((ours[tensor] - theirs[tensor]).abs() <= near).all())
        checks.expect(
            where, f"{tensor} as in {checkpoint.step} commit {checkpoint.seq}", True, same
        )


def existing_ledger(cfg: RunConfig) -> Tracker | None:
    """Without creating one."""
    if (
        cfg.tracking_uri.startswith("sqlite:")
        and not Path(cfg.tracking_uri.removeprefix("sqlite:///")).is_file()
    ):
        return None
    tracker = tracker_of(cfg)
    return tracker if tracker.client.get_experiment_by_name(cfg.experiment) is not None else None


def runs_with(tracker: Tracker, tags: dict[str, str]) -> Iterator[Any]:
    query, page = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()), None
    while True:
        found = tracker.client.search_runs(
            [tracker.experiment_id], filter_string=query, page_token=page
        )
        yield from found
        page = found.token
        if not page:
            return


def _one_run(runs: Sequence[Any], what: str, checks: Checks) -> Any:
    checks.expect(f"MLflow run of {what}", "how many there are", 1, len(runs))
    return runs[0] if runs else None
