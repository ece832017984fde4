"""MLflow's own UI of a real run, in a browser, and forged pages that the audit finds."""

import json
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient

from agentgym.audit import audit
from agentgym.comparison.tables import logged_metrics, logged_tables, result_files
from agentgym.config import load_config
from agentgym.pipeline.table import run_key
from agentgym.tracking.deliver import CellPoints, deliver_comparison
from agentgym.tracking.points import Point
from agentgym.tracking.saved_view import COLUMNS, SECTIONS, VIEWS, link_to
from agentgym.tracking.step_page import note_of_comparison
from tests.servers import chromium_browser

EXPERIMENT = "agentgym-babyai"
SEEN_S = 60.0  # time for a page to load its content


@pytest.fixture(scope="module")
def folder(copy_run, tmp_path_factory):
    """Folder of a finished run for this file only."""
    return copy_run(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def client(folder):
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture(scope="module")
def experiment(client):
    return client.get_experiment_by_name(EXPERIMENT)


@pytest.fixture(scope="module")
def parent(client, experiment):
    (run,) = client.search_runs([experiment.experiment_id], "tags.kind = 'pipeline'")
    return run


@pytest.fixture(scope="module")
def page(folder, chromium, mlflow_server):
    """Return a function of (path, *texts) that opens a page of MLflow's UI and awaits the texts."""
    with mlflow_server(folder) as address, chromium_browser() as browser:
        opened = browser.new_page(viewport={"width": 1500, "height": 1000})

        def show(path, *texts):
            opened.goto("about:blank")
            opened.goto(f"{address}/{path}", timeout=60_000)
            for text in texts:
                opened.get_by_text(text).first.wait_for(timeout=SEEN_S * 1000)
            return opened

        yield show


def test_the_saved_view_opens_as_charts_of_the_named_metrics(page, experiment):
    metrics = [metric for title in list(SECTIONS)[:2] for metric, _ in SECTIONS[title]]
    opened = page(link_to(experiment.experiment_id, VIEWS[0]), *SECTIONS, *metrics)
    opened.locator(".js-plotly-plot").nth(2).wait_for(timeout=SEEN_S * 1000)


def test_the_saved_views_table_begins_with_the_results(page, experiment):
    table = link_to(experiment.experiment_id, VIEWS[0]).replace("=CHART", "=TABLE")
    opened = page(table, "result/gain_high")
    # the table's elements may stand in another order than their places on the screen
    shown = opened.locator(".ag-header-cell[col-id*='`']").evaluate_all(
        "cells => cells.map(cell => [parseFloat(cell.style.left), cell.getAttribute('col-id')])"
    )
    columns = [column for _, column in sorted(shown) if column in COLUMNS]
    assert columns == list(COLUMNS)[: len(columns)]
    assert len(columns) >= 7


def test_a_run_begins_with_its_result_in_numbers_and_words(client, experiment, parent):
    (last,) = client.search_runs([experiment.experiment_id], "tags.step = 'evaluate-stage-2'")
    metrics = parent.data.metrics
    assert metrics["result/success"] == pytest.approx(metrics["eval/avg_at_2"], abs=5e-5)
    low, gain, high = (metrics[f"result/{name}"] for name in ("gain_low", "gain", "gain_high"))
    assert low <= gain <= high
    start = client.get_metric_history(parent.info.run_id, "eval/avg_at_2")[0].value
    assert gain == pytest.approx(metrics["eval/avg_at_2"] - start, abs=5e-5)
    success = f"**Success {100 * metrics['eval/avg_at_2']:.1f} ["
    for run in (parent, last):
        first = run.data.tags["mlflow.note.content"].splitlines()[0]
        assert first.startswith(success)
        assert first.endswith(" points** (avg@2, 12 items)")
        assert run.data.metrics["result/gain"] == gain


def test_a_runs_page_shows_data_source_and_description(page, experiment, parent):
    where = f"#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}"
    opened = page(where, "babyai train", "agentgym-flow", "Run r")
    text = opened.inner_text("body")
    assert "delivered" not in text
    assert "agentgym audit" in text


def test_a_runs_tab_of_system_metrics_has_charts_of_them(page, experiment, parent):
    where = f"#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}/system-metrics"
    page(where, "process_cpu_percentage", "disk_available_megabytes")


def test_a_models_page_shows_the_decision_and_what_it_was_made_of(page):
    opened = page("#/models/agentgym-babyai/versions/1", "PROMOTE", "Lineage:")
    text = opened.inner_text("body")
    assert "the first model of this name" in text
    assert "gate.decision" in text


def test_a_trace_opens_turn_by_turn(page, client, experiment):
    found = client.search_traces(locations=[experiment.experiment_id], max_results=1)[0]
    where = f"#/experiments/{experiment.experiment_id}/traces?traceId={found.info.trace_id}"
    page(where, found.data.spans[0].name, found.data.spans[1].name[:20])


@pytest.fixture(scope="module")
def comparison(folder, tiny_params, client, experiment):
    """MLflow run of a comparison from docs/results with the finished run as a cell."""
    result = json.loads((Path(__file__).parents[3] / "docs/results/unlock.json").read_text())
    cfg, files = load_config(tiny_params(folder, deterministic=True)), result_files(result)
    cell = CellPoints("a seed 0", cfg, run_key(cfg), {"row": "a"}, [])
    numbers = Point(1, 5000, logged_metrics(result))
    params = {"recipes": "grpo, sft", "seeds": "0, 1, 2"}
    files |= logged_tables(result)
    deliver_comparison("unlock", result["key"], [cell], files, params, numbers)
    (run,) = client.search_runs([experiment.experiment_id], "tags.kind = 'comparison'")
    return run


def test_a_comparisons_page_shows_its_table_and_its_figures(page, experiment, comparison):
    where = f"#/experiments/{experiment.experiment_id}/runs/{comparison.info.run_id}"
    opened = page(where, "A locked door in BabyAI, 150 demonstrations", "gain avg@4")
    figures = opened.locator("img[src^='get-artifact?path=unlock']")
    figures.last.wait_for(timeout=SEEN_S * 1000)
    opened.wait_for_function(
        "[...document.querySelectorAll(\"img[src^='get-artifact']\")].every(i => i.naturalWidth)",
        timeout=SEEN_S * 1000,
    )
    assert figures.count() == 2
    rows = table_of(comparison, "rows_table.json")
    assert rows[0]["row"] == "grpo ScalingInter, locked door"
    assert comparison.data.params == {"recipes": "grpo, sft", "seeds": "0, 1, 2"}
    key = "gain/grpo ScalingInter_ locked door"  # MLflow allows no comma
    assert comparison.data.metrics[key] == rows[0]["gain avg_at_4"]
    assert comparison.data.metrics[key.replace("gain", "gain_low")] == rows[0]["gain avg_at_4 low"]
    shown = json.loads(comparison.data.tags["mlflow.loggedArtifacts"])
    assert [each["path"] for each in shown] == ["rows_table.json", "contrasts_table.json"]


def table_of(run, name):
    """Return a row of a table as a dict."""
    path = Path(run.info.artifact_uri.removeprefix("file://"), name)
    table = json.loads(path.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def test_a_description_has_whole_lines_and_room_for_the_figures():
    text = "".join(f"| row {number:04d} | {'x' * 90} |\n" for number in range(200))
    note = note_of_comparison("run", text, ["a.png", "b c.png", "a.json"])
    assert len(note) <= 7100
    table, _, end = note.partition("\n\nThe rest is among the artifacts.\n\n")
    assert set(table.splitlines()) <= set(text.splitlines())
    assert len(table) > 6500
    assert "](get-artifact?path=b%20c.png&run_uuid=run)" in end
    assert "a.json" not in end
    assert note_of_comparison("run", "short\n", []) == "short"


def test_checkpoints_are_ranked_by_what_their_evaluations_found(client, experiment, folder):
    some = client.search_logged_models(
        [experiment.experiment_id], filter_string="name = 'stage-2'"
    )[0]
    metric = next(each for each in some.metrics if each.key == "eval/avg_at_2")
    ranked = client.search_logged_models(
        [experiment.experiment_id],
        filter_string="metrics.`eval/avg_at_2` >= 0",
        datasets=[{"dataset_name": metric.dataset_name, "dataset_digest": metric.dataset_digest}],
        order_by=[{"field_name": "metrics.eval/avg_at_2", "ascending": False}],
    )
    assert {each.name for each in ranked} == {"initialize", "warm-start", "stage-1", "stage-2"}
    values = [next(m.value for m in each.metrics if m.key == "eval/avg_at_2") for each in ranked]
    assert values == sorted(values, reverse=True)


def test_every_step_has_its_data_and_a_description(client, experiment, parent):
    children = client.search_runs(
        [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    told = {
        run.data.tags["step"]: sorted(each.tags[0].value for each in run.inputs.dataset_inputs)
        for run in children
    }
    assert told["prepare"] == ["test", "train", "validation"]
    assert told["stage-1"] == ["train", "validation"]
    assert told["evaluate-stage-2"] == ["test"]
    assert all(run.data.tags["mlflow.note.content"] for run in children)
    visible = {
        tag for run in [parent, *children] for tag in run.data.tags if not tag.startswith("mlflow.")
    }
    assert not {tag for tag in visible if "delivered" in tag or tag in ("manifest", "records")}
    files = {each.path for each in client.list_artifacts(parent.info.run_id)}
    assert {"packages.txt", "report.html", "decisions"} <= files


FORGERIES = {
    "inputs": "update datasets set digest = 'another' where name = 'babyai test'",
    "models": "update logged_model_metrics set metric_value = 1.0"
    " where metric_name = 'eval/avg_at_2'",
    "traces": r"update spans set content = replace(content, 'reward\": 0.0', 'reward\": 1.0')",
    "fewer": "delete from trace_info where request_id ="
    " (select request_id from trace_tags where key = 'success' limit 1)",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_page_is_found(copy_run, tmp_path, tiny_params, tiny_endpoint, forgery):
    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute(FORGERIES[forgery]).rowcount > 0
    checks = audit(load_config(params), num_episodes=1, num_rescored=1).checks
    assert [check.name for check in checks if not check.ok] == ["pages"], checks


@pytest.mark.slow
def test_pages_are_audited_through_a_server_too(
    copy_run, tmp_path, tiny_params, tiny_endpoint, mlflow_server
):
    """Request fewer traces at a time: a server's limit is lower than a database's."""
    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    with mlflow_server(tmp_path) as address:
        cfg = load_config(params, [f"tracking.uri={address}"])
        honest = audit(cfg, num_episodes=1, num_rescored=1)
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            database.execute(FORGERIES["traces"])
        forged = audit(cfg, num_episodes=1, num_rescored=1)
    assert honest.ok, [check.failures for check in honest.checks if not check.ok]
    assert [check.name for check in forged.checks if not check.ok] == ["pages"]
