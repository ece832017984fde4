"""The index follows the store: new commits, deleted ones and damaged ones."""

import sqlite3

import pytest

from agentgym.records import encode_trajectories
from agentgym.viewer.bodies import Gone
from agentgym.viewer.index import SCHEMA, Address, Index
from agentgym.viewer.query import Query
from agentgym.viewer.viewer import Viewer
from tests.agentgym.viewer.conftest import episode, failed

FOLDER = f"stage-1-{'a' * 16}"


def items(viewer):
    return sorted(row["item"] for row in viewer.lists.page(Query()).rows)


def blob(made, manifest, name="trajectories.jsonl.gz"):
    return made.folder / "store/steps" / FOLDER / "blobs" / manifest.records[name].digest


def test_only_what_came_since_is_read(made, view):
    made.add([episode(0), episode(1)])
    viewer = view()
    assert items(viewer) == ["babyai_0", "babyai_1"]
    assert viewer.refresh().steps == 0
    stamp = viewer.index.stamp
    made.add([episode(2)])
    found = viewer.refresh()
    assert (found.steps, found.episodes, found.dropped) == (1, 1, 0)
    assert items(viewer) == ["babyai_0", "babyai_1", "babyai_2"]
    assert viewer.index.stamp != stamp


def test_an_episode_is_read_back_as_it_was_committed(made, view):
    first, second = episode(0), failed(1, 3)
    made.add([first, second])
    found = view().bodies.find(Address(FOLDER, 0, 0, 1))
    assert found.episode == second
    assert found.address == f"{FOLDER}.0.t1"


def test_attempts_that_failed_and_demonstrations_are_there_too(made, view):
    demos = {"demos.jsonl.gz": encode_trajectories([episode(5)])}
    attempts = {"attempts.jsonl.gz": encode_trajectories([failed(6)])}
    made.add([episode(0)], records=attempts, blobs=demos)
    viewer = view()
    assert items(viewer) == ["babyai_0", "babyai_5", "babyai_6"]
    assert viewer.bodies.find(Address.parse(f"{FOLDER}.0.d0")).episode.item.task_id == 5


def test_a_step_that_goes_on_otherwise_is_read_anew(made, view):
    made.add([episode(0)])
    made.add([episode(1)])
    viewer = view()
    with made.store.open("stage-1", "a" * 64) as writer:
        writer.fall_back()
    made.add([episode(2), episode(3)])
    found = viewer.refresh()
    assert (found.dropped, found.episodes) == (2, 3)
    assert items(viewer) == ["babyai_0", "babyai_2", "babyai_3"]
    assert viewer.lists.page(Query(words="red")).total == 3  # deleted text is not found


def test_collected_and_vanished_steps_are_told(made, view):
    manifest = made.add([episode(0)])
    made.add([episode(1)], step="stage-2", key="b")
    viewer = view()
    made.store.collect(manifest)
    viewer.refresh()
    assert items(viewer) == ["babyai_1"]
    with pytest.raises(Gone, match="removed by `agentgym gc`"):
        viewer.bodies.find(Address(FOLDER, 0, 0, 0))
    (made.folder / "store/steps" / f"stage-2-{'b' * 16}").rename(made.folder / "away")
    viewer.refresh()
    assert items(viewer) == []
    with pytest.raises(Gone, match="no longer in this store"):
        viewer.bodies.find(Address(f"stage-2-{'b' * 16}", 0, 0, 0))
    with pytest.raises(Gone, match="nor is known to have"):
        viewer.bodies.find(Address(f"stage-3-{'b' * 16}", 0, 0, 0))


def test_what_is_damaged_is_said_and_the_rest_is_read(made, view):
    manifest = made.add([episode(0)])
    made.add([episode(1)])
    blob(made, manifest).write_bytes(b"not what was written")
    viewer = view()
    assert items(viewer) == ["babyai_1"]
    (problem,) = viewer.index.reader.execute("SELECT seq, said FROM problems").fetchall()
    assert problem["seq"] == 0
    assert "is damaged" in problem["said"]


def test_an_episode_that_was_made_to_break_its_reader_is_a_problem_and_no_crash(made, view):
    import gzip

    deep = gzip.compress(b"[" * 100_000)
    made.add([], records={"trajectories.jsonl.gz": deep})
    made.add([], records={"trajectories.jsonl.gz": gzip.compress(b" " * 2**27)})
    made.add([episode(2)])
    viewer = view()
    assert items(viewer) == ["babyai_2"]
    said = [row["said"] for row in viewer.index.reader.execute("SELECT said FROM problems")]
    assert "RecursionError" in said[0]
    assert "made to fill memory" in said[1]


def test_an_episode_of_a_later_version_is_a_problem_and_no_crash(made, view):
    data = encode_trajectories([episode(0)])
    import gzip

    later = gzip.compress(gzip.decompress(data).replace(b'"schema":2', b'"schema":9'))
    made.add([], records={"trajectories.jsonl.gz": later})
    (problem,) = view().index.reader.execute("SELECT said FROM problems").fetchall()
    assert "record schema 9" in problem["said"]


def test_half_a_file_leaves_no_half_of_its_episodes(made, view):
    lines = encode_trajectories([episode(0), episode(1)])
    made.add([], records={"trajectories.jsonl.gz": lines[:-40]})
    made.add([episode(2)])
    viewer = view()
    assert items(viewer) == ["babyai_2"]
    assert viewer.lists.page(Query(words="red")).total == 1


def test_a_run_has_the_name_that_mlflow_knows(made, view):
    start = made.add([episode(0)], done=True)
    made.add([episode(1)], step="stage-2", key="b", parents={"stage-1": start.digest})
    mark = made.folder / "delivered" / ("c" * 64)
    mark.mkdir(parents=True)
    (mark / f"stage-1-{'a' * 16}").touch()
    viewer = view()
    (run,) = viewer.index.reader.execute("SELECT name, done FROM runs").fetchall()
    assert tuple(run) == ("r" + "c" * 12, 0)
    assert len(viewer.lists.page(Query({"run": ("r" + "c" * 12,)})).rows) == 2


@pytest.mark.parametrize("harm", ["deleted", "cut", "noise", "older", "other"])
def test_an_index_that_cannot_be_trusted_is_built_anew(made, harm):
    made.add([episode(n) for n in range(200)])
    with_it = Viewer.open(made.cfg())
    with_it.refresh()
    path = with_it.index.path
    with_it.close()
    if harm == "deleted":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif harm == "noise":
        data = bytearray(path.read_bytes())
        data[:4096] = bytes(4096)
        path.write_bytes(bytes(data))
    else:
        name, value = ("schema", SCHEMA - 1) if harm == "older" else ("root", "/elsewhere")
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))
        connection.close()
    again = Viewer.open(made.cfg())
    assert again.refresh().episodes == 200
    assert again.lists.page(Query()).total == 200
    again.close()


def test_an_index_that_was_not_closed_is_looked_through_and_damage_in_it_found(made):
    made.add([episode(n) for n in range(200)])
    killed = Viewer.open(made.cfg())
    killed.refresh()
    path = killed.index.path
    killed.index._connect("rw").execute("PRAGMA wal_checkpoint(TRUNCATE)")
    killed.index._lock.close()  # as when its process ends
    data = bytearray(path.read_bytes())
    for page in range(8, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 512] = b"\xff" * 512
    path.write_bytes(bytes(data))
    again = Viewer.open(made.cfg())
    assert again.refresh().episodes == 200
    again.close()
    killed.replays.close()


def test_one_process_writes_an_index_and_others_read_it(made, view):
    made.add([episode(0)])
    first = view()
    second = Viewer.open(made.cfg())
    assert first.index.writes
    assert not second.index.writes
    assert items(second) == ["babyai_0"]
    made.add([episode(1)])
    first.refresh()
    assert items(second) == ["babyai_0", "babyai_1"]
    second.close()
    assert first.index.writes


def test_a_manifest_of_a_newer_version_is_a_problem_of_its_step_alone(made, view, monkeypatch):
    made.add([episode(0)])
    made.add([episode(1)], step="stage-2", key="b")
    file = made.folder / "store/steps" / FOLDER / "manifests/000000.json"
    text = file.read_text()
    assert '"schema_version": 1' in text
    file.write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    viewer = view()
    assert items(viewer) == ["babyai_1"]
    (problem,) = viewer.index.reader.execute("SELECT said FROM problems").fetchall()
    assert "schema_version 99" in problem["said"]


def test_an_index_of_one_store_is_not_that_of_another(tmp_path):
    assert Index.place(tmp_path, "a") != Index.place(tmp_path, "b")
