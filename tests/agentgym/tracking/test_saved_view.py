"""Saved views open MLflow's charts and keep the user's changes."""

import base64
import json
import zlib

import pytest

from agentgym.tracking.saved_view import (
    NOTE,
    OURS,
    PREFIX,
    VIEWS,
    link_to,
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
        "#/experiments/7/runs?viewStateShareKey=agentgym-steps&compareRunsMode=CHART"
    )


def test_a_new_experiment_gets_all_of_it_and_a_second_time_nothing():
    first = tags_of_experiment({}, "agentgym-babyai")
    assert {*first} == {*(PREFIX + view.key for view in VIEWS), NOTE, OURS}
    assert tags_of_experiment(first, "agentgym-babyai") == {}


@pytest.mark.parametrize("mine", ["changed", None])
def test_what_a_person_changed_or_deleted_stays(mine):
    tags = tags_of_experiment({}, "agentgym-babyai")
    tags["team"] = "ours"
    for tag in (PREFIX + TURNS.key, NOTE):
        if mine is None:
            del tags[tag]
        else:
            tags[tag] = mine
    assert tags_of_experiment(tags, "agentgym-babyai") == {}


def test_what_nobody_touched_follows_the_version_of_the_program():
    tags = tags_of_experiment({}, "before")
    later = tags_of_experiment(tags, "after")
    assert {*later} == {NOTE, OURS}
    assert "after" in later[NOTE]
    assert tags_of_experiment(tags | later, "after") == {}
