"""Downloads of episodes."""

import io
import json
import zipfile

from starlette.testclient import TestClient

from agentgym.data.trajectories import read_file
from agentgym.records import from_json
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


def test_conversations_in_agentgyms_layout_are_read_again_with_the_same_replies(
    made, view, tmp_path
):
    episodes = [episode(0), episode(7)]
    made.add([*episodes, failed(2)])
    file = tmp_path / "out/episodes.json"
    written, left_out = write_conversations(view(), Query({"success": ("yes",)}), file)
    rows, recorded, refused = read_file(file)
    assert (written, left_out, refused) == (len(rows), len(episodes) - len(rows), [])
    replies = {each.item.item_id: each.replies for each in recorded}
    for each in episodes:
        assert replies[each.item.item_id] == tuple(t.reply or t.action for t in each.turns)
    first = rows[0]["conversations"]
    assert first[0]["value"] == episodes[0].first_observation
    assert [message["from"] for message in first[:3]] == ["human", "gpt", "human"]


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
