"""MLflow against the store: every committed point once, nothing else, and the checkpoint under
its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.audit.lines import Line
from agentgym.audit.report import Tally
from agentgym.config import RunConfig
from agentgym.evaluation.champion import decide
from agentgym.evaluation.publish import headline_tags
from agentgym.ledger import tracker_of
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking import Tracker
from agentgym.training.checkpoint import WEIGHTS


def check_ledger(
    cfg: RunConfig, store: RunStore, key: str, lines: Sequence[Line], tally: Tally
) -> None:
    """The parent run has the points of headline steps, each child those of its step; there are
    no other children.
    """
    tracker = _existing_ledger(cfg)
    parent = (
        _one_run(tracker, {"run_key": key, "kind": "pipeline"}, f"the run's {key[:12]}", tally)
        if tracker
        else None
    )
    if tracker is None or parent is None:
        if tracker is None:
            tally.fail(
                f"no ledger with experiment {cfg.tracking.experiment!r} at {cfg.tracking_uri}"
            )
        return
    tracked = [line for line in lines if line.points or line.final is not None]
    headline = [line for line in tracked if line.step.headline]
    _check_points(tracker, parent.info.run_id, "parent run", headline, tally)
    for line in tracked:
        identity = {"mlflow.parentRunId": parent.info.run_id, "step_key": line.key, "kind": "step"}
        run = _one_run(tracker, identity, line.name, tally)
        if run is not None:
            _check_points(tracker, run.info.run_id, f"run of {line.name}", [line], tally)
            if line.final is not None:
                tally.expect(
                    f"run of {line.name}",
                    "tag manifest",
                    line.final.digest,
                    run.data.tags.get("manifest"),
                )
                if line.final.follows is not None:  # else the records check says so
                    tally.expect(
                        f"run of {line.name}",
                        "tag records",
                        line.final.records_digest,
                        run.data.tags.get("records"),
                    )
    _check_artifacts(store, parent.info.artifact_uri, lines, tally)
    known = {line.key for line in lines}
    for run in _runs(tracker, {"mlflow.parentRunId": parent.info.run_id, "kind": "step"}):
        if run.data.tags.get("step_key") not in known:
            tally.fail(
                f"MLflow run {run.info.run_id} ({run.data.tags.get('step')}) belongs to no commit"
                " of this run"
            )


def _check_artifacts(store: RunStore, location: str, lines: Sequence[Line], tally: Tally) -> None:
    """The report that people open in MLflow is the committed one."""
    report = next(
        (line.final for line in lines if line.name == "report" and line.final is not None), None
    )
    if report is None:
        return
    if not location.startswith(("file://", "/")):
        tally.skipped += 1  # on a remote artifact store
        return
    for name in (*report.blobs, *report.records):
        path = Path(location.removeprefix("file://")) / name
        try:
            same = path.read_bytes() == store.read(report, name)
        except (LookupError, ValueError, OSError) as error:
            tally.fail(f"parent run: {name} cannot be compared: {error}")
            continue
        tally.expect("parent run", f"{name} as in report commit {report.seq}", True, same)


def _check_points(
    tracker: Tracker, run_id: str, where: str, lines: Sequence[Line], tally: Tally
) -> None:
    """Point by point; counted, so that one delivered twice is one too many.
    The newest commits of an unfinished step may still wait for their delivery.
    """
    got = Counter(tracker.points(run_id))
    expected: Counter[tuple[str, int, int, float]] = Counter()
    for line in lines:
        waiting = line.final is None
        for _, points in sorted(line.points.items(), reverse=True):
            of_commit = Counter(
                (name, point.step, point.time_ms, value)
                for point in points
                for name, value in point.metrics.items()
            )
            waiting = waiting and not of_commit & got
            expected += Counter() if waiting else of_commit
    tally.counted += expected.total()
    for what, extra in (
        ("missing", expected - got),
        ("not of any commit, or more than once", got - expected),
    ):
        for name, step, time_ms, value in sorted(extra.elements()):
            tally.fail(f"{where}: {name} at step {step}: {value!r} (stamped {time_ms}) is {what}")


def check_registry(
    cfg: RunConfig, store: RunStore, key: str, lines: Sequence[Line], tally: Tally
) -> None:
    line = next((line for line in lines if line.name == "register"), None)
    if line is None or line.final is None or line.checkpoint is None:
        return
    tracker = _existing_ledger(cfg)
    if tracker is None:
        tally.skipped += 1  # the ledger's check has said so
        return
    from mlflow.exceptions import MlflowException

    registered, checkpoint = line.final.results, line.checkpoint
    name, number = str(registered["model"]), str(registered["version"])
    where = f"{name} version {number}"
    try:
        version = tracker.client.get_model_version(name, number)
    except MlflowException as error:
        tally.fail(f"{where}: {error.message}")
        return
    wanted = {"step_key": checkpoint.digest, "weights.sha256": checkpoint.blobs[WEIGHTS].digest}
    if version.tags.get("run_key") == key:
        evaluation = next(
            manifest for parent, manifest in line.parents.items() if parent.startswith("evaluate-")
        )
        wanted |= {"evaluation": evaluation.digest, **headline_tags(evaluation)}
    else:
        # another run reached the same checkpoint and speaks of its own evaluation
        tally.skipped += 1
    for tag, value in wanted.items():
        tally.expect(where, f"tag {tag}", value, version.tags.get(tag))
    _check_registered_weights(tracker, store, version, checkpoint, where, tally)
    try:
        champion = tracker.client.get_model_version_by_alias(name, str(registered["alias"]))
    except MlflowException as error:
        tally.fail(f"{where}: alias {registered['alias']}: {error.message}")
        return
    decision = registered["champion"]
    if not decision["moved"] and str(champion.version) != number:
        _check_decision(cfg, tracker, name, version.tags, decision, where, tally)
    elif champion.tags.get("run_key") in (key, None):
        tally.expect(
            where, f"version under alias {registered['alias']}", number, str(champion.version)
        )
    else:
        tally.skipped += 1  # the alias has moved on to another run's model


def _check_decision(
    cfg: RunConfig,
    tracker: Tracker,
    name: str,
    ours: Mapping[str, str],
    decision: Mapping[str, Any],
    where: str,
    tally: Tally,
) -> None:
    """That the alias stayed: decided again, where both evaluations are still the ones it was
    decided by.
    """
    from mlflow.exceptions import MlflowException

    try:
        theirs = tracker.version_tags(name, str(decision["over"]))
    except MlflowException:
        theirs = {}
    if theirs.get("evaluation") != decision["over_evaluation"] or "evaluation" not in theirs:
        tally.skipped += 1  # the model it was compared with is gone, or was evaluated anew
        return
    again = decide(ours, where, str(decision["over"]), theirs, cfg.evaluation)
    tally.expect(
        where, "decision on the alias", {key: again[key] for key in decision}, dict(decision)
    )


def _check_registered_weights(
    tracker: Tracker, store: RunStore, version: Any, checkpoint: Manifest, where: str, tally: Tally
) -> None:
    """The model people load, not what its tags say of it."""
    from safetensors.torch import load

    location = (
        tracker.client.get_logged_model(version.model_id).artifact_location
        if version.model_id
        else version.source
    )
    path = Path(str(location).removeprefix("file://")) / "model" / "model.safetensors"
    if not str(location).startswith(("file://", "/")):
        tally.skipped += 1  # on a remote artifact store
        return
    try:
        ours, theirs = load(store.read(checkpoint, WEIGHTS)), load(path.read_bytes())
    except (LookupError, ValueError, OSError) as error:
        tally.fail(f"{where}: weights cannot be compared: {error}")
        return
    for tensor in sorted(ours):
        same = tensor in theirs and bool((ours[tensor] == theirs[tensor]).all())
        tally.expect(where, f"{tensor} as in {checkpoint.step} commit {checkpoint.seq}", True, same)


def _existing_ledger(cfg: RunConfig) -> Tracker | None:
    """Without creating one."""
    if (
        cfg.tracking_uri.startswith("sqlite:")
        and not Path(cfg.tracking_uri.removeprefix("sqlite:///")).is_file()
    ):
        return None
    tracker = tracker_of(cfg)
    return (
        tracker
        if tracker.client.get_experiment_by_name(cfg.tracking.experiment) is not None
        else None
    )


def _runs(tracker: Tracker, tags: dict[str, str]) -> Iterator[Any]:
    query, page = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()), None
    while True:
        found = tracker.client.search_runs(
            [tracker.experiment_id], filter_string=query, page_token=page
        )
        yield from found
        page = found.token
        if not page:
            return


def _one_run(tracker: Tracker, tags: dict[str, str], what: str, tally: Tally) -> Any:
    runs = list(_runs(tracker, tags))
    tally.expect(f"MLflow run of {what}", "how many there are", 1, len(runs))
    return runs[0] if runs else None
