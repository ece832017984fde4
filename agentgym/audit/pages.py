"""What MLflow shows beside points: inputs, checkpoints with their numbers, traces, against what is
committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgym.audit.ledger import existing_ledger, runs_with
from agentgym.audit.report import Checks
from agentgym.audit.steps import StepRecord
from agentgym.config import RunConfig
from agentgym.store.runstore import RunStore
from agentgym.tracking.inputs import inputs_of
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.pages import EVALUATED, MANIFEST, STORE_KEY, episodes_of
from agentgym.tracking.traces import DIGEST, digest_of_spans, drawn, trace_id_of, trace_of

PAGE = 500  # traces; a server answers no request for more


def check_pages(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Of each finished step that is in MLflow."""
    tracker = existing_ledger(cfg)
    if tracker is None:
        return
    parents = list(runs_with(tracker, {"run_key": key, "kind": "pipeline"}))
    if len(parents) != 1:
        return  # the ledger's check says so
    runs: dict[str, Any] = {}
    for each in runs_with(tracker, {"mlflow.parentRunId": parents[0].info.run_id}):
        runs.setdefault(each.data.tags.get("step_key", ""), each)
    for record in steps:
        if record.final is None:
            continue
        run = runs.get(record.key)
        if run is None or MANIFEST not in run.data.tags:
            checks.skipped += 1  # it is not there yet
            continue
        with checks.guard(record.name):
            _check_inputs(cfg, store, record, run, checks)
            _check_model(tracker, record, checks)
            _check_traces(cfg, store, tracker, record, run.info.run_id, checks)


def _check_inputs(
    cfg: RunConfig, store: RunStore, record: StepRecord, run: Any, checks: Checks
) -> None:
    assert record.final is not None
    wanted = sorted((i.name, i.digest, i.split) for i in inputs_of(cfg, store, record.final))
    found = sorted(
        (each.dataset.name, each.dataset.digest, next((t.value for t in each.tags), ""))
        for each in run.inputs.dataset_inputs
    )
    checks.expect(f"run of {record.name}", "data it read", wanted, found)


def _check_model(tracker: Tracker, record: StepRecord, checks: Checks) -> None:
    """The numbers by which checkpoints are ranked are those of their evaluations."""
    final = record.final
    if final is None or "summary" not in final.results:
        return
    step = str(final.results["checkpoint"])
    query = f"name = '{step}' and tags.{STORE_KEY} = '{final.parents[step]}'"
    found = tracker.client.search_logged_models([tracker.experiment_id], filter_string=query)
    checks.expect(f"checkpoint {step}", "logged models of it", 1, len(found))
    # of one measured at another time another evaluation tells
    wanted = {
        (name, point.step, point.time_ms): value
        for point in record.points.get(final.seq, [])[-1:]
        for name, value in point.metrics.items()
        if name.startswith(EVALUATED)
    }
    told = {
        place: metric.value
        for model in found
        for metric in model.metrics or ()
        if (place := (metric.key, metric.step, metric.timestamp)) in wanted
    }
    wrong = sorted(place for place in wanted if told.get(place) != wanted[place])
    checks.expect(f"checkpoint {step}", "numbers that are missing or others", [], wrong)


def _traces(tracker: Tracker, run_id: str) -> list[Any]:
    """All of a run."""
    found: list[Any] = []
    token: str | None = None
    while token is None or token:
        page = tracker.client.search_traces(
            locations=[tracker.experiment_id], run_id=run_id, max_results=PAGE, page_token=token
        )
        found += page
        token = page.token or ""
    return found


def _check_traces(
    cfg: RunConfig,
    store: RunStore,
    tracker: Tracker,
    record: StepRecord,
    run_id: str,
    checks: Checks,
) -> None:
    """Each that is there is of a committed episode, as it was, and those drawn are there."""
    assert record.final is not None
    found = _traces(tracker, run_id)
    commit, episodes = episodes_of(store, record.final)
    committed = {trace_id_of(commit, each): each for each in episodes}
    chosen = drawn(episodes, record.final.key, cfg.tracking.traces)
    wanted = {trace_id_of(commit, each) for each in chosen}
    where = f"traces of {record.name}"
    there = {each.info.trace_id for each in found}
    if there:
        checks.expect(where, "episodes drawn that are missing", [], sorted(wanted - there))
    for each in found:
        episode = committed.get(each.info.trace_id)
        if episode is None:
            checks.fail(f"{where}: {each.info.trace_id} is of no committed episode")
            continue
        own = trace_of(commit, episode)
        spans = [span.to_dict() for span in each.data.spans]
        checks.expect(where, f"{own.name}: what it shows", own.digest, digest_of_spans(spans))
        checks.expect(where, f"{own.name}: tag", own.tags[DIGEST], each.info.tags.get(DIGEST))
