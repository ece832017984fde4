"""A step's data by revision, and its episodes: one trace with a span per turn."""

import json
from dataclasses import replace

import pytest

from agentgym.config import RunConfig
from agentgym.data.items import Splits
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import store_at
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.step_data import (
    LISTS,
    MAX_CHARS,
    MAX_TURNS,
    drawn,
    dvc_revision,
    inputs_of,
    trace_id_of,
    trace_of,
)
from agentgym.types import Item, Status, Trajectory, Turn

ITEMS = tuple(Item("babyai", task, "train") for task in range(9))
SPLITS = Splits(ITEMS[:5], ITEMS[5:7], ITEMS[7:], "d" * 64, ())
CFG = RunConfig()


@pytest.fixture
def store(tmp_path):
    return store_at(tmp_path / "store", lease_ttl_s=30.0)


def committed(store, step, config, parents=None, blobs=None):
    with store.open(step, "12" * 32) as writer:
        return writer.commit(
            done=True,
            state={},
            parents=parents or {},
            config=config,
            blobs=blobs or {},
            records={},
            results={},
            timings={},
        )


def test_each_step_has_the_splits_it_read(store):
    prepared = committed(store, "prepare", {}, blobs={LISTS: SPLITS.to_json()})
    parents = {"prepare": prepared.digest}
    trained = committed(store, "stage-1", {"validation": {"num_items": 1}}, parents)
    judged = committed(
        store, "evaluate-stage-1", {"evaluation": {"split": "test", "num_items": 2}}, parents
    )
    told = {
        each.step: [(i.split, i.num_items) for i in inputs_of(CFG, store, each)]
        for each in (prepared, trained, judged)
    }
    assert told == {
        "prepare": [("train", 5), ("validation", 2), ("test", 2)],
        "stage-1": [("train", 5), ("validation", 1)],
        "evaluate-stage-1": [("test", 2)],
    }
    names = {each.name for each in inputs_of(CFG, store, prepared)}
    assert names == {"babyai train", "babyai validation", "babyai test"}
    assert inputs_of(CFG, store, committed(store, "report", {})) == []


def test_another_list_has_another_digest(store):
    other = Splits(SPLITS.train[::-1], SPLITS.validation, SPLITS.test, "d" * 64, ())
    digests = []
    for number, splits in enumerate((SPLITS, other)):
        made = committed(store, f"prepare-{number}", {}, blobs={LISTS: splits.to_json()})
        digests.append([each.digest for each in inputs_of(CFG, store, made)])
    assert digests[0][0] != digests[1][0]
    assert digests[0][1:] == digests[1][1:]


def test_the_revision_is_that_of_the_pointer_that_dvc_keeps(store, tmp_path):
    data = tmp_path / "lists"
    assert dvc_revision(data) == ""
    (tmp_path / "lists.dvc").write_text("outs:\n- md5: 37ab.dir\n  path: lists\n")
    assert dvc_revision(data) == "37ab.dir"
    cfg = CFG.model_copy(update={"data": CFG.data.model_copy(update={"path": data})})
    made = committed(store, "prepare", {}, blobs={LISTS: SPLITS.to_json()})
    source = json.loads(inputs_of(cfg, store, made)[0].source)
    assert source == {"uri": str(data), "dvc": "37ab.dir"}


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


STEERING = "\x00\x1b[2J\ud83d\r"  # refused by Postgres, terminals and UTF-8


def steering():
    """Return an episode with control characters in all texts of models and servers."""
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
    # MLflow's list has a column for each name of Feedback
    assert [(each.name, each.value) for each in found.info.assessments] == [("success", True)]
    assert found.info.tags["step"] == "evaluate-stage-1"
