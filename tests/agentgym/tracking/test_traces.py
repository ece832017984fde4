"""An episode is one trace with a span per turn, however often it is delivered."""

import json
from dataclasses import replace

import pytest

from agentgym.store.manifest import Manifest
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.step_data import MAX_CHARS, MAX_TURNS, drawn, trace_id_of, trace_of
from agentgym.types import Item, Status, Trajectory, Turn

KEY = "ab" * 32
BEGAN = 1_700_000_000.0


def episode(task=3, sample=1, success=True, turns=3, began=BEGAN, status=Status.TERMINATED):
    told = tuple(
        Turn(f"go {n}", f"seen {n}", float(n == turns - 1), generate_s=0.5, env_s=0.25, version=7)
        for n in range(turns)
    )
    timing = {"began_s": began} if began else {}
    item = Item("babyai", task, "test")
    return Trajectory(
        item, sample, 0, 12, status, 1.0, success, "goal", told, (), (), (), timing=timing
    )


@pytest.fixture
def commit():
    return Manifest(
        step="evaluate-stage-1",
        key=KEY,
        seq=2,
        done=True,
        parents={},
        config={},
        state={},
        blobs={},
        records={},
        results={},
        timings={},
        epoch=1,
        created_at=BEGAN + 100,
        follows="",
    )


def test_a_trace_tells_of_each_turn_what_was_seen_done_and_answered_and_when(commit):
    trace = trace_of(commit, episode())
    root, *turns = trace.spans
    assert root["parent_span_id"] is None
    assert {turn["parent_span_id"] for turn in turns} == {root["span_id"]}
    began = [turn["start_time_unix_nano"] / 1e9 - BEGAN for turn in turns]
    assert began == pytest.approx([0.0, 0.75, 1.5], abs=1e-5)
    assert (trace.began_ms, trace.took_ms) == (int(BEGAN * 1000), 2250)
    told = turns[1]["attributes"]
    assert told["mlflow.spanInputs"] == '{"prompt_tail": "seen 0"}'
    assert '"action": "go 1"' in told["mlflow.spanOutputs"]
    assert '"observation": "seen 1"' in told["mlflow.spanOutputs"]
    assert (told["generate_s"], told["weights"]) == ("0.5", "7")
    assert trace.tags["success"] == "true"


def test_a_record_without_times_has_those_of_its_commit(commit):
    assert trace_of(commit, episode(began=None)).began_ms == int((BEGAN + 100) * 1000)


def test_texts_and_turns_are_cut_from_the_front(commit):
    long = episode(turns=MAX_TURNS + 5)
    trace = trace_of(commit, long)
    assert len(trace.spans) == 1 + MAX_TURNS
    assert trace.spans[-1]["name"] == f"turn {MAX_TURNS + 5}: go {MAX_TURNS + 4}"
    told = replace(long, first_observation="x" * 9000 + "end")
    assert trace_of(commit, told).request == "... " + "x" * (MAX_CHARS - 3) + "end"


def test_the_draw_has_successes_and_failures_and_is_the_same_again(commit):
    episodes = [episode(task, success=task % 5 == 0) for task in range(100)]
    failed = episode(200, status=Status.ENV_ERROR, success=False)
    chosen = drawn([*episodes, failed], KEY, 6)
    assert sum(each.success for each in chosen) == 3
    assert len({trace_id_of(commit, each) for each in chosen}) == 6
    assert drawn([failed, *reversed(episodes)], KEY, 6) == chosen
    assert drawn(episodes, "cd" * 32, 6) != chosen
    assert len(drawn([each for each in episodes if each.success], KEY, 6)) == 6
    assert failed not in drawn([failed], KEY, 6)


STEERING = "\x00\x1b[2J\ud83d\r"  # refused by Postgres, by terminals, by UTF-8


def steering():
    """An episode whose texts hold what a model samples and a server answers."""
    turn = Turn(f"go{STEERING}", f"seen{STEERING}", 1.0, reply=f"I go{STEERING}")
    return replace(episode(), first_observation=f"goal{STEERING}", turns=(turn,))


def test_text_that_a_database_refuses_is_spelled_out_in_a_trace(commit):
    trace = trace_of(commit, steering())
    spelled = r"\x00\x1b[2J\ud83d\x0d"
    assert trace.request == f"goal{spelled}"
    assert trace.spans[1]["name"] == f"turn 1: go{spelled}"
    shown = json.loads(trace.spans[1]["attributes"]["mlflow.spanOutputs"])
    assert (shown["reply"], shown["observation"]) == (f"I go{spelled}", f"seen{spelled}")


@pytest.mark.integration
@pytest.mark.slow
def test_episodes_of_any_text_reach_an_mlflow_on_postgres(
    commit, postgres, mlflow_server, tmp_path
):
    backend = f"--backend-store-uri={postgres.made('traces')}"
    with mlflow_server(tmp_path, backend, f"--artifacts-destination={tmp_path}") as address:
        tracker = Tracker(address, "tests", tmp_path)
        tags = {"note": STEERING}
        run = tracker.parent_run("12" * 32, params={"a": STEERING}, tags=tags, title=STEERING)
        trace = trace_of(commit, steering())
        for _ in range(2):
            tracker.log_trace(trace, run)
        (found,) = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=run)
        assert [span.name for span in found.data.spans] == [s["name"] for s in trace.spans]
        assert [(each.name, each.value) for each in found.info.assessments] == [("success", True)]


def test_a_trace_that_is_delivered_twice_is_there_once(tracker, commit):
    run = tracker.parent_run("12" * 32, params={}, tags={})
    trace = trace_of(commit, episode())
    for _ in range(2):
        tracker.log_trace(trace, run)
    (found,) = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=run)
    assert found.info.trace_id == trace_id_of(commit, episode())
    assert [span.name for span in found.data.spans] == [
        "babyai_3 sample 1",
        "turn 1: go 0",
        "turn 2: go 1",
        "turn 3: go 2",
    ]
    assert found.data.spans[2].outputs["observation"] == "seen 1"
    # a column of MLflow's list: Feedback has one for each name
    assert [(each.name, each.value) for each in found.info.assessments] == [("success", True)]
    assert found.info.tags["step"] == "evaluate-stage-1"
