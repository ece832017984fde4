"""Downloads of episodes."""

import io
import json
import zipfile
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.data.trajectories import read_file, read_files
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories, from_json
from agentgym.types import Turn
from agentgym.viewer.app import make_app
from agentgym.viewer.bundle import write_bundle, write_conversations, write_lines
from agentgym.viewer.query import Query
from tests.agentgym.viewer.conftest import KEPT, SCRIPT, episode, failed

FOLDER = f"stage-1-{'a' * 16}"


def test_json_lines_are_the_records_with_where_they_lie(made, view, tmp_path):
    own = episode(0, learned=KEPT)
    made.add([failed(1), own])
    viewer = view()
    count = write_lines(viewer, Query({"success": ("yes",)}), tmp_path / "out/episodes.jsonl")
    (line,) = (tmp_path / "out/episodes.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert count == 1
    assert told.pop("address") == f"{FOLDER}.0.t1"
    assert told.pop("stage") == "stage-1"
    assert from_json(told) == own
    answer = TestClient(make_app(viewer)).get("/export.jsonl?success=yes")
    assert answer.text.splitlines() == [line]


def test_a_line_that_cannot_be_read_says_so_and_the_others_are_there(made, view, tmp_path):
    manifest = made.add([episode(0)])
    made.add([episode(1)])
    viewer = view()
    digest = manifest.records["trajectories.jsonl.gz"].digest
    (made.folder / "store/steps" / FOLDER / "blobs" / digest).unlink()
    write_lines(viewer, Query(), tmp_path / "lines")
    first, second = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert "is not there" in first["error"]
    assert second["item"]["task_id"] == 1


def test_a_bundle_is_pages_that_lead_to_each_other_and_nowhere_else(made, view, tmp_path):
    made.add([episode(0, first_observation=SCRIPT), episode(1)])
    viewer = view()
    assert write_bundle(viewer, Query(), tmp_path / "bundle") == 2
    index = (tmp_path / "bundle/index.html").read_text()
    assert 'href="e/0000.html"' in index
    assert "Content-Security-Policy" in index
    page = (tmp_path / "bundle/e/0001.html").read_text()
    assert "&lt;script&gt;" in page
    assert 'href="../view.css"' in page
    assert 'href="/' not in index + page
    assert "<form" not in index + page
    answer = TestClient(make_app(viewer)).get("/bundle.zip")
    names = zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
    assert sorted(names) == [
        *("episodes/e/0000.html", "episodes/e/0001.html", "episodes/icon.svg"),
        *("episodes/index.html", "episodes/view.css", "episodes/view.js"),
    ]


def test_trajectories_in_the_published_layout_are_read_with_the_same_actions(made, view, tmp_path):
    thought = Turn("move", "there", 1.0, reply="Thought: é \ud800\nAction: move")
    own = episode(1, first_observation=SCRIPT)
    own = replace(own, turns=(*own.turns, thought))
    long = replace(own.turns[0], action="x" * 16_385)
    made.add([own, episode(1, sample=2), episode(1, sample=3), failed(2)])
    made.add([episode(4, turns=()), episode(5, turns=(long,))])
    file, viewer = tmp_path / "out/own.json", view()
    assert write_conversations(viewer, Query(), file) == (3, 3)
    rows, recorded, refused = read_file(file)
    assert refused == []
    assert [(each.item.item_id, each.replies) for each in recorded] == [
        ("babyai_1", ("turn left", "move forward", "Thought: é ?\nAction: move")),
        ("babyai_1", ("turn left", "move forward")),
        ("babyai_2", ("turn left", "move forward")),
    ]
    assert rows[1] == {
        "item_id": "babyai_1",
        "conversations": [
            {"from": "human", "loss": None, "value": "goal: go to the red ball"},
            {"from": "gpt", "loss": True, "value": "turn left"},
            {"from": "human", "loss": None, "value": "see: turn left done"},
            {"from": "gpt", "loss": True, "value": "move forward"},
        ],
    }
    assert rows[0]["conversations"][0]["value"] == SCRIPT
    assert write_conversations(viewer, Query({"success": ("no",)}), file) == (1, 0)
    assert write_conversations(viewer, Query({"env": ("none",)}), file) == (0, 0)
    assert json.loads(file.read_text()) == []


@pytest.mark.integration
def test_a_runs_own_episodes_are_accepted_for_another_run_to_learn_from(
    copy_run, tiny_params, tmp_path
):
    params = tiny_params(copy_run(tmp_path / "run"), deterministic=True)
    file = tmp_path / "own.json"
    query = "success=yes&split=train&stage=stage-1&stage=stage-2"
    words = ["--agentgym", str(file), "--query", query]
    cfg = load_config(params)
    (run,) = {head.key for head in open_store(cfg).heads("runs")}
    assert main(["view", f"r{run[:5]}", "--params", str(params), *words]) == 0
    rows, refused = read_files([file], cfg, drop_refused=False)
    assert (rows, refused) == (json.loads(file.read_text()), [])
    store = open_store(cfg)
    played = [
        (episode.item.item_id, *(turn.reply or turn.action for turn in episode.turns))
        for name in ("stage-1", "stage-2")
        for commit in store.history(name, finished(cfg, store)[name].key)
        for episode in decode_trajectories(store.read(commit, TRAJECTORIES))
        if episode.success
    ]
    told = {
        (row["item_id"], *(each["value"] for each in row["conversations"][1::2])) for row in rows
    }
    assert told <= set(played)
    assert len(told) == len(rows) > 0
