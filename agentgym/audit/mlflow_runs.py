"""Check what MLflow shows of runs in addition to points: names, tags, parameters, descriptions,
files, inputs, checkpoints with their numbers, and traces must be those of the commits. The expected
values come from the functions that delivered them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.ledger import existing_ledger
from agentgym.audit.stored_steps import StepRecord, final_of
from agentgym.config import RunConfig
from agentgym.evaluation.history import FOLDER
from agentgym.steps.step import Kind
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import PACKAGES, RECORDS, delivery_tags, run_tags, run_title
from agentgym.tracking.mlflow import (
    CONTEXT,
    SOURCE_RUN,
    TRACE_NAME,
    Tracker,
    all_pages,
    flat_params,
    local_path,
    pipeline_name,
    profile_of,
)
from agentgym.tracking.points import raised, with_flat_limits
from agentgym.tracking.saved_view import tags_of_experiment
from agentgym.tracking.step_data import (
    OF_MACHINE,
    OURS,
    DatasetInput,
    EpisodeTrace,
    digest_of_spans,
    drawn,
    inputs_of,
    spans_of,
    trace_id_of,
    trace_of,
)
from agentgym.tracking.step_page import (
    EVALUATED,
    MANIFEST,
    STORE_KEY,
    TABLE,
    checkpoint_params,
    episodes_of,
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
# tags that MLflow sets on a trace
OF_MLFLOW = ("mlflow.artifactLocation", "mlflow.trace.spansLocation")
PAGE = 500  # traces; the server refuses to return more at once


def check_pages(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Check runs, inputs, logged models and traces in MLflow; skip unfinished steps, and finished
    ones that MLflow lacks. Nothing is checked unless MLflow has exactly one run of the pipeline.
    key: the run's key.
    """
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.skip("pages", "there is no ledger, as that check reports")
        return
    parents = list(tracker.runs_with({"run_key": key, "kind": "pipeline"}))
    if len(parents) != 1:
        checks.skip("pages of the run", "the ledger check does not find its run")
        return
    (parent,) = parents
    runs: dict[str, Any] = {}
    for child in tracker.runs_with({"mlflow.parentRunId": parent.info.run_id}):
        runs.setdefault(child.data.tags.get("step_key", ""), child)
    with checks.guard("parent run"):
        delivered = [record for record in steps if record.key in runs]
        _check_parent_run(cfg, store, tracker, key, delivered, parent, checks)
    for record in steps:
        if record.final is None:
            continue
        run = runs.get(record.key)
        if run is None or MANIFEST not in run.data.tags:
            checks.skip(f"pages of {record.name}", "MLflow does not have the whole step yet")
            continue
        with checks.guard(record.name):
            _check_step_run(record, parent, run, checks)
            data = inputs_of(cfg, store, record.final)
            _check_inputs(f"run of {record.name}", run, data, checks)
            if record.step.kind is Kind.PREPARE:
                _check_inputs("parent run", parent, data, checks)
            _check_model(tracker, record, run.info.run_id, checks)
            _check_traces(tracker, record, run.info.run_id, checks)


def _check_step_run(record: StepRecord, parent: Any, run: Any, checks: Checks) -> None:
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
    files = {TABLE: table_of(record.store, final)} if evaluated else {}
    _check_files(where, run, files, (), checks)


def _check_parent_run(
    cfg: RunConfig,
    store: RunStore,
    tracker: Tracker,
    key: str,
    steps: Sequence[StepRecord],
    run: Any,
    checks: Checks,
) -> None:
    """Check tags, parameters and files of the pipeline's MLflow run, and its status if it ended.
    key: the run's key. steps: those that have an MLflow run of their own.
    """
    where = "parent run"
    name = pipeline_name(run_title(cfg), key)
    tags = {"run_key": key, "kind": "pipeline", NAME: name, **run_tags(cfg, key)}
    for record in steps:
        if record.step.headline:
            tags |= _delivered(record, run)
    report = final_of(steps, Kind.REPORT)
    files = {}
    if report is not None:
        tags |= note_tags(note_of_pipeline(cfg, tracker, report, key, run.info.run_id))
        files = {name: store.read(report, name) for name in (*report.blobs, *report.records)}
        _check_ended(where, run, checks)
    _check_tags(where, run, tags, checks)
    number = tracker.experiment_id
    shown = tracker.client.get_experiment(number).tags
    for name, text in tags_of_experiment({}, tracker.experiment, number).items():
        if shown.get(name) != text:
            checks.skip(f"tag {name} of the experiment", "a user changed it, as any user may")
    _check_params(where, run, cfg.semantic(), checks)
    # the decisions check compares the files of this store's decisions
    _check_files(where, run, files, (FOLDER,), checks)


def _delivered(record: StepRecord, run: Any) -> dict[str, str]:
    """Return the tags that an MLflow run must have from the delivery of a step.

    If several values are right, the run's own is returned: the tag of an alarm may show any of the
    times it was raised, in the words of an earlier version, too, and an unfinished step may have
    delivered any of its commits.
    """
    there = run.data.tags
    points = [point for of_commit in record.points.values() for point in of_commit]
    tags = delivery_tags(record.commits[-1], points)
    if record.final is None:
        tags = {name: there[name] for name in tags if name in there}
    for alarm, _ in raised(points):
        name, text = f"alarm.{alarm.name}", plain(str(alarm))
        shown = there.get(name, "")
        tags |= {name: shown} if with_flat_limits(shown) == with_flat_limits(text) else {}
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
    """Compare an MLflow run's artifacts with `wanted` (path -> content).

    Artifacts on another machine and files that are not wanted are skipped; those in the top-level
    `folders` are ignored.
    """
    root = local_path(run.info.artifact_uri)
    if root is None:
        why = "its artifact store is on another machine"
        checks.skip(f"files of the {where}", why, bool(wanted))
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


def _check_inputs(where: str, run: Any, data: Sequence[DatasetInput], checks: Checks) -> None:
    there = [(logged.dataset, logged.tags) for logged in run.inputs.dataset_inputs]
    wanted = sorted(
        (plain(d.name), d.digest, [(CONTEXT, d.split)], profile_of(d), "local", None) for d in data
    )
    shown = sorted(
        (d.name, d.digest, [(t.key, t.value) for t in tags], d.profile, d.source_type, d.schema)
        for d, tags in there
    )
    checks.expect(where, "data it read", wanted, shown)
    sources = {plain(dataset.source) for dataset in data}
    for dataset, _ in there:
        if dataset.source not in sources:
            checks.skip("where data lies", "it is another folder than here")


def _check_model(tracker: Tracker, record: StepRecord, run_id: str, checks: Checks) -> None:
    """Check the logged model of an evaluated checkpoint and its metrics; skip other steps.
    run_id: the step's MLflow run.
    """
    final = record.final
    if final is None or not is_evaluated(final):
        return
    step = str(final.results["checkpoint"])
    where = f"checkpoint {step}"
    query = f"name = '{step}' and tags.{STORE_KEY} = '{final.parents[step]}'"
    models = tracker.client.search_logged_models([tracker.experiment_id], filter_string=query)
    if not checks.expect(where, "logged models of it", 1, len(models)):
        return
    (model,) = models
    there = model.model_type, model.status
    checks.expect(where, "kind and state", ("checkpoint", "READY"), there)
    checks.expect(where, "parameters", checkpoint_params(final), dict(model.params))
    shown_tags = {name: text for name, text in model.tags.items() if name != "store"}
    checks.expect(where, "tags", {STORE_KEY: final.parents[step], "step": step}, shown_tags)
    if model.tags.get("store") != plain(record.store.root):
        checks.skip("tag store of a checkpoint", "the store is elsewhere now")
    # a checkpoint that another evaluation measured too has numbers of several runs
    wanted = Counter(
        (name, point.step, point.time_ms, value)
        for point in record.points.get(final.seq, [])[-1:]
        for name, value in point.metrics.items()
        if name.startswith(EVALUATED)
    )
    shown = Counter(
        (metric.key, metric.step, metric.timestamp, metric.value)
        for metric in model.metrics or ()
        if metric.run_id == run_id
    )
    wrong = sorted(((wanted - shown) + (shown - wanted)).elements())
    checks.expect(where, "numbers that are missing or others", [], wrong)
    others = {metric.run_id for metric in model.metrics or ()} - {run_id}
    checks.skip(f"numbers of {where} of other runs", "these runs' audits compare them", len(others))


def _check_traces(tracker: Tracker, record: StepRecord, run_id: str, checks: Checks) -> None:
    """Check that each trace of the MLflow run `run_id` shows a committed episode unchanged.
    If the run has traces, those of all episodes that `drawn` chooses must be there.
    """
    assert record.final is not None
    query = {"locations": [tracker.experiment_id], "run_id": run_id, "max_results": PAGE}
    traces = list(all_pages(lambda token: tracker.client.search_traces(**query, page_token=token)))
    commit, episodes = episodes_of(record.store, record.final)
    committed = {trace_id_of(commit, episode): episode for episode in episodes}
    chosen = drawn(episodes, record.final.key, record.cfg.tracking.traces)
    wanted = {trace_id_of(commit, episode) for episode in chosen}
    where = f"traces of {record.name}"
    there = {trace.info.trace_id for trace in traces}
    if there:
        checks.expect(where, "episodes drawn that are missing", [], sorted(wanted - there))
    for trace in traces:
        episode = committed.get(trace.info.trace_id)
        if episode is None:
            checks.fail(f"{where}: {trace.info.trace_id} is of no committed episode")
            continue
        expected = trace_of(commit, episode)
        _check_trace(f"{where}: {expected.name}", expected, trace, run_id, checks)


def _check_trace(
    where: str, expected: EpisodeTrace, trace: Any, run_id: str, checks: Checks
) -> None:
    info = trace.info
    spans = [span.to_dict() for span in trace.data.spans]
    checks.expect(where, "what it shows", digest_of_spans(expected.spans), digest_of_spans(spans))
    checks.expect(where, "spans", spans_of(expected.spans), spans_of(spans))
    wanted = {**expected.tags, TRACE_NAME: expected.name}
    for name in sorted({*wanted, *info.tags} - {*OF_MLFLOW}):
        checks.expect(where, f"tag {name}", wanted.get(name), info.tags.get(name))
    there = str(info.state), info.request_time, info.trace_metadata.get(SOURCE_RUN)
    checks.expect(where, "state, start and run", ("OK", expected.began_ms, run_id), there)
    # MLflow computes the duration from the spans, with rounding
    is_near = info.execution_duration in (expected.took_ms, expected.took_ms + 1)
    shown_ms = expected.took_ms if is_near else info.execution_duration
    checks.expect(where, "milliseconds", expected.took_ms, shown_ms)
    judged = [(a.name, a.value, a.source.source_id, a.rationale) for a in info.assessments]
    checks.expect(where, "assessments", [("success", expected.success, "default", None)], judged)
    checks.expect(where, "preview of its end", expected.response, info.response_preview)
    if info.request_preview != expected.request:
        checks.skip("previews of traces", "MLflow cuts them")
