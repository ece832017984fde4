"""A store on S3 is shown like one in a folder, and is only read."""

import json

import boto3
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentgym.store import bucket
from agentgym.viewer.app import make_app
from agentgym.viewer.index import TOKENIZER
from agentgym.viewer.viewer import Viewer
from tests.agentgym.viewer.conftest import KEPT, Made, episode, failed

FIRST = f"/e/stage-1-{'a' * 16}.0.t0"


@pytest.fixture
def made(tmp_path, s3_uri):
    """A store on S3."""
    return Made(tmp_path, s3_uri)


def objects(uri):
    """Return {key: ETag} of all objects."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    told = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)
    return {each["Key"]: each["ETag"] for each in told["Contents"]}


def test_lists_episodes_and_tokens_are_shown_and_nothing_is_written(made, view, monkeypatch):
    words = {f"word-{number}": number for number in range(20)}
    files = {"tokenizer.json": Tokenizer(WordLevel(words, unk_token="word-0")).to_str()}
    made.add([episode(0, learned=KEPT), failed(1)], blobs={TOKENIZER: json.dumps(files).encode()})
    before = objects(made.uri)
    viewer = view()
    client = TestClient(make_app(viewer))
    assert made.uri in client.get("/").text
    assert "babyai_1" in client.get("/episodes?success=no").text
    assert "babyai_0" in client.get("/episodes?q=%22red+ball%22").text
    read, names = viewer.store.read, []
    monkeypatch.setattr(
        viewer.store, "read", lambda commit, name: names.append(name) or read(commit, name)
    )
    page = client.get(f"{FIRST}?overlay=ratio").text
    assert "see: move forward done" in page
    assert ">word-16</span>" in page  # the first token of the second action
    assert client.get(f"{FIRST}/text/2/observation").text == "see: move forward done"
    assert client.get(f"{FIRST}/group").status_code == 200
    assert sorted(names) == [TOKENIZER, "trajectories.jsonl.gz"]  # each is read once
    assert objects(made.uri) == before
    made.add([episode(2)])
    found = viewer.refresh()
    assert (found.steps, found.episodes) == (1, 1)
    assert "babyai_2" in client.get("/episodes").text


def test_a_store_that_does_not_answer_is_said(made, view, monkeypatch):
    made.add([episode(0)])
    view().close()
    monkeypatch.setattr(bucket, "MAX_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    viewer = Viewer.open(made.cfg())
    client = TestClient(make_app(viewer))
    assert "babyai_0" in client.get("/episodes").text  # from the index
    answer = client.get(FIRST)
    assert answer.status_code == 503
    assert "The store cannot be read now" in answer.text
    assert "127.0.0.1:1" in answer.text
    viewer.close()
