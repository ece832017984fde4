"""Saved views open MLflow's charts and keep the user's changes."""

import base64
import json
import zlib

import pytest

from agentgym.tracking.points import Point
from agentgym.tracking.saved_view import (
    KIND,
    NOTE,
    OURS,
    PREFIX,
    VIEWS,
    link_to,
    link_to_newest,
    tags_of_experiment,
    value_of,
)

STEPS, TURNS, TOKENS = VIEWS
MAX_TAG_CHARS = 20_000  # MLflow's limit for a tag of an experiment


def state_of(value):
    """Decode a state as the UI does."""
    packed = json.loads(value)["state"].removeprefix("deflate;")
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_a_view_has_the_named_charts_over_one_axis():
    for view, axis in ((STEPS, "step"), (TURNS, "metric"), (TOKENS, "metric")):
        state = state_of(value_of(view))
        charts = state["compareRunCharts"]
        metrics = {chart["metricKey"] for chart in charts}
        assert {"rollout/success", "rollout/max_turns", "rollout/turns_mean"} <= metrics
        assert {"actor/update_kl", "rollout/entropy", "perf/generated_tokens_per_s"} <= metrics
        assert {chart["xAxisKey"] for chart in charts} == {axis}
        assert {chart["selectedXAxisMetricKey"] for chart in charts} == {view.axis}
        sections = {section["uuid"] for section in state["compareRunSections"]}
        assert {chart["metricSectionId"] for chart in charts} == sections
        assert len(value_of(view)) < MAX_TAG_CHARS
    assert link_to("7", STEPS) == (
        "#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=agentgym-steps"
        "&compareRunsMode=CHART"
    )


def test_a_views_table_begins_with_results_and_tells_runs_apart():
    state = state_of(value_of(STEPS))
    assert state["columnOrder"] == state["selectedColumns"]
    assert [column.split("`")[1] for column in state["columnOrder"][:7]] == [
        "result/success",
        "result/gain",
        "result/gain_low",
        "result/gain_high",
        "algorithm",
        "environment",
        "seed",
    ]


def test_the_newest_pipelines_charts_are_linked_and_of_other_runs_none(tracker):
    assert link_to_newest(tracker.client) == ""
    tracker.evaluation_run("d" * 64, "evaluation of chance", params={}, tags={})
    assert link_to_newest(tracker.client) == ""
    tracker.deliver(tracker.parent_run("k" * 64, params={}, tags={}), [Point(1, 1, {"loss": 1.0})])
    other = tracker.client.create_experiment("other")
    assert link_to_newest(tracker.client) == link_to(tracker.experiment_id, STEPS)
    assert other != tracker.experiment_id
    tracker.client.create_run(other, tags={"kind": "pipeline"})
    assert link_to_newest(tracker.client) == link_to(other, STEPS)


def test_a_new_experiment_gets_all_of_it_and_a_second_time_nothing():
    first = tags_of_experiment({}, "agentgym-babyai", "7")
    assert {*first} == {*KIND, *(PREFIX + view.key for view in VIEWS), NOTE, OURS}
    assert all(link_to("7", view) in first[NOTE].splitlines()[0] for view in VIEWS)
    assert tags_of_experiment(first, "agentgym-babyai", "7") == {}


@pytest.mark.parametrize("mine", ["changed", None])
def test_what_a_person_changed_or_deleted_stays(mine):
    tags = tags_of_experiment({}, "agentgym-babyai", "7")
    tags["team"] = "ours"
    for tag in (PREFIX + TURNS.key, NOTE):
        if mine is None:
            del tags[tag]
        else:
            tags[tag] = mine
    assert tags_of_experiment(tags, "agentgym-babyai", "7") == {}


def test_what_nobody_touched_follows_the_version_of_the_program():
    tags = tags_of_experiment({}, "before", "7")
    later = tags_of_experiment(tags, "after", "7")
    assert {*later} == {NOTE, OURS}
    assert "after" in later[NOTE]
    assert tags_of_experiment(tags | later, "after", "7") == {}
