"""Check what MLflow shows in addition to points: inputs, checkpoints with their numbers, and traces
must be those of the commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.ledger import existing_ledger, runs_with
from agentgym.audit.mlflow_runs import check_parent_run, check_step_run
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.steps.step import Kind
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import CONTEXT, SOURCE_RUN, TRACE_NAME, Tracker, profile_of
from agentgym.tracking.step_data import (
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
    checkpoint_params,
    episodes_of,
    is_evaluated,
)
from envs.plain import plain

# tags that MLflow sets on a trace
OF_MLFLOW = ("mlflow.artifactLocation", "mlflow.trace.spansLocation")
PAGE = 500  # traces; the server refuses to return more at once


def check_pages(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Check runs, data inputs, logged models and traces in MLflow, for finished delivered steps."""
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.skip("pages", "there is no ledger, as that check reports")
        return
    parents = list(runs_with(tracker, {"run_key": key, "kind": "pipeline"}))
    if len(parents) != 1:
        checks.skip("pages of the run", "the ledger check does not find its run")
        return
    (parent,) = parents
    runs: dict[str, Any] = {}
    for child in runs_with(tracker, {"mlflow.parentRunId": parent.info.run_id}):
        runs.setdefault(child.data.tags.get("step_key", ""), child)
    with checks.guard("parent run"):
        delivered = [record for record in steps if record.key in runs]
        check_parent_run(cfg, store, tracker, key, delivered, parent, checks)
    for record in steps:
        if record.final is None:
            continue
        run = runs.get(record.key)
        if run is None or MANIFEST not in run.data.tags:
            checks.skip(f"pages of {record.name}", "MLflow does not have the whole step yet")
            continue
        with checks.guard(record.name):
            check_step_run(store, record, parent, run, checks)
            data = inputs_of(cfg, store, record.final)
            _check_inputs(f"run of {record.name}", run, data, checks)
            if record.step.kind is Kind.PREPARE:
                _check_inputs("parent run", parent, data, checks)
            _check_model(store, tracker, record, run.info.run_id, checks)
            _check_traces(cfg, store, tracker, record, run.info.run_id, checks)


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


def _check_model(
    store: RunStore, tracker: Tracker, record: StepRecord, run_id: str, checks: Checks
) -> None:
    """Check the logged model of an evaluated checkpoint, and the numbers that rank it."""
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
    checks.expect(
        where, "kind and state", ("checkpoint", "READY"), (model.model_type, model.status)
    )
    checks.expect(where, "parameters", checkpoint_params(final), dict(model.params))
    tags = {STORE_KEY: final.parents[step], "step": step}
    there = {name: text for name, text in model.tags.items() if name != "store"}
    checks.expect(where, "tags", tags, there)
    if model.tags.get("store") != plain(store.root):
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


def _traces(tracker: Tracker, run_id: str) -> list[Any]:
    """All traces of a run, over all pages of the search."""
    traces: list[Any] = []
    token: str | None = None
    while token is None or token:
        page = tracker.client.search_traces(
            locations=[tracker.experiment_id], run_id=run_id, max_results=PAGE, page_token=token
        )
        traces += page
        token = page.token or ""
    return traces


def _check_traces(
    cfg: RunConfig,
    store: RunStore,
    tracker: Tracker,
    record: StepRecord,
    run_id: str,
    checks: Checks,
) -> None:
    """Check that each trace shows a committed episode unchanged.

    If a run has traces, none of the drawn episodes may be missing.
    """
    assert record.final is not None
    traces = _traces(tracker, run_id)
    commit, episodes = episodes_of(store, record.final)
    committed = {trace_id_of(commit, episode): episode for episode in episodes}
    chosen = drawn(episodes, record.final.key, cfg.tracking.traces)
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
