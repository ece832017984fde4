"""MLflow shows each commit once, however often it is delivered."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.store.runstore import store_at
from agentgym.tracking.deliver import StaleRun, deliver_committed
from agentgym.tracking.mlflow import Tracker, local_path
from agentgym.tracking.points import LedgerError, Point, encode_points

RUN_KEY, KEY = "12" * 32, "ab" * 32


@pytest.mark.integration
@pytest.mark.slow
def test_a_database_is_there_whole_or_not_at_all_when_its_maker_is_killed(tmp_path):
    database = tmp_path / "mlflow.db"
    code = (
        "import sys; from pathlib import Path; from agentgym.tracking.mlflow import Tracker;"
        " Tracker(sys.argv[1], 'x', Path(sys.argv[2])).client"
    )
    for size in (1, 200_000):  # at the first byte, and with some tables created
        maker = subprocess.Popen(
            [sys.executable, "-c", code, f"sqlite:///{database}", str(tmp_path / "artifacts")]
        )
        partial = [tmp_path / f".tmp-mlflow.db{suffix}" for suffix in ("", "-wal")]
        while (
            maker.poll() is None
            and sum(path.stat().st_size for path in partial if path.exists()) < size
        ):
            time.sleep(0.002)
        maker.kill()
        assert maker.wait() == -signal.SIGKILL
        assert not database.exists()
    tracker = Tracker(f"sqlite:///{database}", "tests", tmp_path / "artifacts")
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    tracker.deliver(run, [Point(1, 0, {"a": 1.0})])
    assert tracker.points(run) == [("a", 1, 0, 1.0)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")) == []


@pytest.fixture
def store(tmp_path):
    return store_at(tmp_path / "store", lease_ttl_s=30.0)


def commit(writer, points, *, done=False):
    writer.commit(
        done=done,
        state={},
        parents={},
        config={},
        blobs={},
        records={"metrics.jsonl": encode_points(points)},
        results={},
        timings={},
    )


def test_a_relative_database_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold an absolute path"):
        Tracker("sqlite:///mlflow.db", "tests", tmp_path)


def test_runs_are_found_again_by_their_keys(tracker):
    parent = tracker.parent_run(
        RUN_KEY, params={"model": {"hidden_size": 128}, "seed": 0}, tags={"algo": "grpo"}
    )
    child = tracker.child_run(parent, "stage 1", KEY, params={"max_turns": 4}, tags={})
    other = tracker.child_run(parent, "stage 2", "cd" * 32, params={}, tags={})
    assert len({parent, child, other}) == 3

    # another process later, with other settings
    again = Tracker(tracker.uri, "tests", tracker.artifact_root)
    assert (
        again.parent_run(
            RUN_KEY, params={"seed": 1, "added": "x"}, tags={"algo": "grpo", "attempt": "2"}
        )
        == parent
    )
    assert again.child_run(parent, "stage 1", KEY, params={"max_turns": 4}, tags={}) == child
    run = again.client.get_run(parent)
    assert run.data.params == {"model.hidden_size": "128", "seed": "0", "added": "x"}
    assert (run.data.tags["algo"], run.data.tags["attempt"], run.data.tags["run_key"]) == (
        "grpo",
        "2",
        RUN_KEY,
    )
    assert again.client.get_run(child).data.tags["mlflow.parentRunId"] == parent
    assert run.info.artifact_uri.startswith(tracker.artifact_root.as_uri())


def test_a_kill_between_creating_a_run_and_describing_it_leaves_no_second_run(tracker, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracker.client, "log_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            tracker.parent_run(RUN_KEY, params={"seed": 0}, tags={})
    parent = tracker.parent_run(RUN_KEY, params={"seed": 0}, tags={})
    assert [run.info.run_id for run in tracker.client.search_runs([tracker.experiment_id])] == [
        parent
    ]
    assert tracker.client.get_run(parent).data.params == {"seed": "0"}


def test_delivering_again_leaves_one_point_each(tracker):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    points = [
        Point(step, 1000 + step, {f"m{index:03d}": step + index / 7 for index in range(400)})
        for step in range(3)
    ]  # 1,200: two batches
    tracker.deliver(run, points[:1])
    tracker.deliver(run, points)
    tracker.deliver(run, points)
    expected = sorted(
        (f"m{index:03d}", step, 1000 + step, step + index / 7)
        for index in range(400)
        for step in range(3)
    )
    assert tracker.points(run) == expected


def test_a_run_ends_once_and_a_failed_one_runs_again(tracker):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    tracker.end_run(run, "FAILED")
    assert tracker.parent_run(RUN_KEY, params={}, tags={}) == run
    assert tracker.client.get_run(run).info.status == "RUNNING"
    tracker.end_run(run)
    ended = tracker.client.get_run(run).info.end_time
    tracker.end_run(run)
    assert tracker.parent_run(RUN_KEY, params={}, tags={}) == run
    assert (tracker.client.get_run(run).info.status, tracker.client.get_run(run).info.end_time) == (
        "FINISHED",
        ended,
    )
    with pytest.raises(ValueError, match="'DONE' must be FINISHED"):
        tracker.end_run(run, "DONE")


@pytest.mark.parametrize("name", ["it's", 'say "go"'])
def test_a_run_is_found_again_by_a_name_with_quotes(tracker, name):
    run = tracker.find_or_create(name, {"cell": name, "kind": "cell"}, {}, {})
    tracker.find_or_create("another", {"cell": "another", "kind": "cell"}, {}, {})
    assert tracker.find_or_create(name, {"cell": name, "kind": "cell"}, {}, {}) == run
    named = Tracker(tracker.uri, name, tracker.artifact_root)
    cell = named.find_or_create("c", {"cell": "c", "kind": "cell"}, {}, {})
    assert [run.info.run_id for run in named.running(["cell"])] == [cell]


def test_a_name_that_mlflow_cannot_find_is_refused(tracker):
    with pytest.raises(LedgerError, match="finds no name with both"):
        tracker.find_run({"cell": 'it\'s "x"'})


def test_artifacts_come_from_memory_or_a_folder(tracker, tmp_path):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    tracker.log_artifacts(run, {"report/index.html": b"<p>", "config.json": b"{}"})
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").write_bytes(b"png")
    tracker.log_artifacts(run, tmp_path / "plots")
    assert sorted(entry.path for entry in tracker.client.list_artifacts(run)) == [
        "config.json",
        "loss.png",
        "report",
    ]
    assert Path(tracker.client.download_artifacts(run, "report/index.html")).read_bytes() == b"<p>"


def test_only_committed_points_reach_the_ledger_and_each_once(tracker, store):
    parent = tracker.parent_run(RUN_KEY, params={}, tags={})
    child = tracker.child_run(parent, "stage 1", KEY, params={}, tags={})
    assert deliver_committed(tracker, store, "stage-1", KEY, [child, parent]) == 0
    with store.open("stage-1", KEY) as writer:
        commit(writer, [Point(0, 1000, {"loss": 3.0}), Point(1, 1001, {"loss": 2.0})])
        assert deliver_committed(tracker, store, "stage-1", KEY, [child, parent]) == 1
        commit(writer, [Point(2, 1002, {"loss": 1.0})])
        commit(writer, [Point(3, 1003, {"loss": 0.5})], done=True)
    assert deliver_committed(tracker, store, "stage-1", KEY, [child, parent]) == 2
    assert deliver_committed(tracker, store, "stage-1", KEY, [child, parent]) == 0
    expected = [
        ("loss", 0, 1000, 3.0),
        ("loss", 1, 1001, 2.0),
        ("loss", 2, 1002, 1.0),
        ("loss", 3, 1003, 0.5),
    ]
    assert tracker.points(child) == tracker.points(parent) == expected


def test_a_kill_between_points_and_their_mark_repeats_nothing(tracker, store, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    with store.open("stage-1", KEY) as writer:
        commit(writer, [Point(0, 1000, {"loss": 3.0})])
    with monkeypatch.context() as patch:
        patch.setattr(tracker.client._tracking_client.store, "_set_tags", killed)
        with pytest.raises(KeyboardInterrupt):
            deliver_committed(tracker, store, "stage-1", KEY, [run])
    assert tracker.points(run) == [("loss", 0, 1000, 3.0)]
    assert deliver_committed(tracker, store, "stage-1", KEY, [run]) == 1
    assert tracker.points(run) == [("loss", 0, 1000, 3.0)]


def test_a_ledger_that_was_lost_is_filled_again(tracker, store, empty_ledger, tmp_path):
    with store.open("stage-1", KEY) as writer:
        commit(writer, [Point(0, 1000, {"loss": 3.0})])
        commit(writer, [Point(1, 1001, {"loss": 2.0})])
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    deliver_committed(tracker, store, "stage-1", KEY, [run])
    before = tracker.points(run)
    shutil.copy(empty_ledger, tmp_path / "fresh.db")
    fresh = Tracker(f"sqlite:///{tmp_path / 'fresh.db'}", "tests", tmp_path / "artifacts")
    run = fresh.parent_run(RUN_KEY, params={}, tags={})
    assert deliver_committed(fresh, store, "stage-1", KEY, [run]) == 2
    assert fresh.points(run) == before


def test_points_of_a_deleted_step_folder_are_not_mistaken_for_the_new_ones(tracker, store):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    child = tracker.child_run(run, "stage 1", KEY, params={}, tags={})
    with store.open("stage-1", KEY) as writer:
        commit(writer, [Point(0, 1000, {"loss": 3.0})])
    assert deliver_committed(tracker, store, "stage-1", KEY, [run]) == 1
    shutil.rmtree(store.root)
    with store.open("stage-1", KEY) as writer:
        commit(writer, [Point(0, 2000, {"loss": 3.0})])
    with pytest.raises(
        StaleRun,
        match=f"MLflow run {run} holds points of commits of stage-1 that the store no longer has",
    ):
        deliver_committed(tracker, store, "stage-1", KEY, [run])
    assert tracker.points(run) == [("loss", 0, 1000, 3.0)]
    tracker.supersede(run)
    again = tracker.parent_run(RUN_KEY, params={}, tags={})
    assert again != run
    assert tracker.child_run(again, "stage 1", KEY, params={}, tags={}) != child
    assert tracker.points(run) == [("loss", 0, 1000, 3.0)]  # superseded, not lost
    assert tracker.client.get_run(run).info.lifecycle_stage == "active"


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("file:///tmp/my%20runs/%23%C3%A9/artifacts", "/tmp/my runs/#é/artifacts"),
        ("/tmp/my runs/a%20b", "/tmp/my runs/a%20b"),
        ("mlflow-artifacts:/1/models", None),
        ("s3://bucket/models", None),
        ("", None),
    ],
)
def test_artifacts_are_found_in_a_folder_whose_name_has_blanks(location, path):
    assert local_path(location) == (path and Path(path))
    if path and location.startswith("file:"):
        assert Path(path).as_uri() == location
