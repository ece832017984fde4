"""Store errors specific to S3: lost responses, throttling, ignored conditions, partial uploads."""

import http.client
import json
import os
import signal
import sys
import threading
import time
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.exceptions import ClientError

from agentgym.config import ConfigError
from agentgym.store import bucket
from agentgym.store.bucket import Bucket, StoreUnreachable, connect
from agentgym.store.lease import Fenced
from agentgym.store.manifest import ManifestError
from agentgym.store.runstore import RunStore, store_at
from agentgym.store.s3 import S3Backend
from tests.agentgym.store.steps import KEY, commit
from tests.answering import Handler, http_server
from tests.completed import completed


class FaultyLink:
    """Link to the S3 server. `fault(method, path, number of such requests so far)` returns:

    an int: respond with this status and do not forward the request.
    "lost": forward it, and respond 500 instead of the server's response.
    "cut": break the response off half way.
    "hang": never respond.
    None: forward it unchanged.
    """

    def __init__(self, endpoint):
        self.fault = lambda *_: None
        self.seen = []
        target, lock, link = urlsplit(endpoint).netloc, threading.Lock(), self

        class Link(Handler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    number = sum(
                        seen.startswith(f"{self.command} {self.path}") for seen in link.seen
                    )
                    link.seen.append(f"{self.command} {self.path}")
                fault = link.fault(self.command, self.path, number)
                if fault == "hang":
                    time.sleep(5)
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    self.reply(fault, {}, b"")
                    return
                connection = http.client.HTTPConnection(target, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                data, headers = response.read(), dict(response.getheaders())
                connection.close()
                if fault == "lost":
                    self.reply(500, {}, b"")
                elif fault == "cut":
                    self.reply(response.status, headers, data, data[: len(data) // 2])
                    self.close_connection = True
                else:
                    self.reply(response.status, headers, data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

            def reply(self, status, headers, data, sent=None):
                self.send_response_only(status)
                length = (
                    headers.get("Content-Length", len(data))
                    if self.command == "HEAD"
                    else len(data)
                )
                for name, value in {**headers, "Content-Length": str(length)}.items():
                    if name not in ("Connection", "Transfer-Encoding"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data if sent is None else sent)

        self.handler = Link


@pytest.fixture
def link(s3_uri, s3_endpoint, monkeypatch):
    made = FaultyLink(s3_endpoint)
    with http_server(made.handler) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield made


def test_the_server_under_these_tests_honours_the_conditions_the_store_stands_on(s3_uri):
    client, key = boto3.client("s3"), s3_uri.removeprefix("s3://tests/")

    def status(**condition):
        try:
            return int(
                client.put_object(Bucket="tests", Key=key, Body=b"x", **condition)[
                    "ResponseMetadata"
                ]["HTTPStatusCode"]
            )
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])

    assert status(IfMatch='"00"') == 404  # no object yet
    assert status(IfNoneMatch="*") == 200
    assert status(IfNoneMatch="*") == 412
    assert status(IfMatch='"00"') == 412
    assert status(IfMatch=client.head_object(Bucket="tests", Key=key)["ETag"]) == 200


def test_a_service_that_ignores_conditions_is_refused_before_a_lease_is_taken(s3_uri):
    for header in ("If-Match", "If-None-Match"):
        client = connect()
        client.meta.events.register(
            "before-sign.s3.PutObject",
            lambda request, header=header, **_: request.headers.__delitem__(header),
        )
        store = RunStore(
            S3Backend(Bucket("tests", client), s3_uri.removeprefix("s3://tests/")), lease_ttl_s=30.0
        )
        with pytest.raises(
            ConfigError,
            match=rf"service ignores {header} on PutObject, so it cannot keep a second writer out",
        ):
            store.open("stage-1", KEY).__enter__()
    assert store.heads() == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_requests_that_the_server_could_not_serve_are_made_again(s3_uri, link, status):
    link.fault = lambda method, path, number: status if number == 0 else None
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    store.verify(head)
    assert store.head("stage-1", KEY) == head


def test_writes_whose_answers_are_lost_count_once(s3_uri, link):
    """Lose each first response: a retry must accept its own write."""
    link.fault = lambda method, path, number: (
        "lost" if method == "PUT" and number % 2 == 0 else None
    )
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step) for step in range(3)]
    assert store.history("stage-1", KEY) == commits
    with store.open("stage-1", KEY) as writer:  # released: no waiting
        assert (writer.epoch, writer.head) == (2, commits[-1])


def test_conditional_writes_that_met_others_are_made_again_and_not_forever(s3_uri, link):
    link.fault = lambda method, path, number: (
        409 if method == "PUT" and number == 1 and path.endswith("head.json") else None
    )
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        assert store.head("stage-1", KEY) == head
        link.fault = lambda method, path, number: (
            409 if method == "PUT" and path.endswith("head.json") else None
        )
        with pytest.raises(StoreUnreachable, match="5 conditional writes met others"):
            commit(writer, 2)
        link.fault = lambda *_: None
    assert store.head("stage-1", KEY) == head


def test_a_commit_whose_fate_is_unknown_is_not_made_twice(s3_uri, link, monkeypatch):
    monkeypatch.setattr(bucket, "MAX_ATTEMPTS", 1)
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        link.fault = lambda method, path, number: (
            "lost" if method == "PUT" and path.endswith("head.json") else None
        )
        with pytest.raises(
            StoreUnreachable,
            match=r"head\.json: 500 .* after 1 attempts; the last commit stays valid",
        ):
            commit(writer, 1)
        link.fault = lambda *_: None
        with pytest.raises(
            Fenced,
            match=(
                r"commit 0 was already begun by this process .* may count or not; stop, and run the"
                r" step again"
            ),
        ):
            commit(writer, 1)
    # it was valid here
    assert [manifest.seq for manifest in store.history("stage-1", KEY)] == [0]


def test_an_answer_that_breaks_off_is_asked_for_again(s3_uri, link):
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1, b"weights " * 1000)
    link.seen.clear()
    link.fault = lambda method, path, number: "cut" if method == "GET" and number == 0 else None
    assert store.head("stage-1", KEY) == head
    store.verify(head)
    assert store.read(head, "model") == b"weights " * 1000


def test_a_server_that_does_not_answer_is_an_error_in_time(s3_uri, link, monkeypatch):
    monkeypatch.setattr(bucket, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(bucket, "READ_TIMEOUT_S", 0.5)
    link.fault = lambda *_: "hang"
    began = time.monotonic()
    with pytest.raises(
        StoreUnreachable,
        match=(
            rf"{s3_uri}/steps/.*/head\.json cannot be reached: .*; check AWS_ENDPOINT_URL and the"
            r" network"
        ),
    ):
        store_at(s3_uri, lease_ttl_s=30.0).head("stage-1", KEY)
    assert time.monotonic() - began < 20
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StoreUnreachable, match="cannot be reached: Could not connect to the endpoint URL"
    ):
        store_at(s3_uri, lease_ttl_s=30.0).head("stage-1", KEY)


def test_a_heart_that_cannot_beat_for_a_while_goes_on(s3_uri, link, monkeypatch):
    monkeypatch.setattr(bucket, "MAX_ATTEMPTS", 1)
    with store_at(s3_uri, lease_ttl_s=0.4).open("stage-1", KEY) as writer:
        link.fault = lambda *_: 503
        time.sleep(0.5)
        link.fault = lambda *_: None
        assert commit(writer, 1).seq == 0
        beats = len([seen for seen in link.seen if seen.endswith("head.json")])
        time.sleep(0.5)
        assert len([seen for seen in link.seen if seen.endswith("head.json")]) > beats


def test_large_content_travels_in_parts_and_half_an_upload_is_pruned(s3_uri, monkeypatch):
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)
    weights = os.urandom(1 << 20) * 12
    script = """
import os, signal, sys
from agentgym.store import bucket, runstore
bucket.PART_BYTES = 5 << 20
store = runstore.store_at(sys.argv[1], lease_ttl_s=30.0)
with store.open("stage-1", "ab" * 32) as writer:
    writer._folder.bucket._client.meta.events.register(
        "before-call.s3.CompleteMultipartUpload", lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    )
    writer.commit(done=False, state={}, parents={}, config={}, blobs={"model": bytes(12 << 20)}, \
records={}, results={}, timings={})
"""
    killed = completed(sys.executable, "-c", script, s3_uri)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    def uploads():
        return list(
            boto3.client("s3")
            .list_multipart_uploads(Bucket="tests", Prefix=s3_uri.removeprefix("s3://tests/"))
            .get("Uploads", ())
        )

    assert len(uploads()) == 1
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1, weights)
        assert writer.prune(keep=1) == 1
    assert uploads() == []
    store.verify(head)
    assert store.read(head, "model") == weights


def test_a_head_that_is_no_head_is_named(s3_uri):
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
    key = f"{s3_uri.removeprefix('s3://tests/')}/steps/stage-1-{KEY[:16]}/head.json"
    head = json.loads(boto3.client("s3").get_object(Bucket="tests", Key=key)["Body"].read())
    assert (head["released"], head["num_commits"], head["spans"]) == (True, 1, [[0, 1]])
    for broken in (
        b"",
        b"[]",
        b"{}",
        json.dumps({**head, "spans": 3}).encode(),
        json.dumps({**head, "holder": {"pid": 1}}).encode(),
    ):
        boto3.client("s3").put_object(Bucket="tests", Key=key, Body=broken)
        with pytest.raises(
            ManifestError, match=r"head\.json is no head of a step .*; restore it from a copy"
        ):
            store.head("stage-1", KEY)


def test_a_step_that_is_deleted_under_its_writer_is_told_so(s3_uri):
    store = store_at(s3_uri, lease_ttl_s=30.0)
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        boto3.resource("s3").Bucket("tests").objects.filter(
            Prefix=s3_uri.removeprefix("s3://tests/")
        ).delete()
        with pytest.raises(
            Fenced,
            match=rf"was deleted while process {os.getpid()} wrote to it; run the step again",
        ):
            commit(writer, 2)


def test_settings_that_cannot_work_are_named(s3_uri, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"there is no bucket nowhere; create it, or correct store\.uri"
    ):
        store_at("s3://nowhere/x", lease_ttl_s=30.0).head("stage-1", KEY)
    with pytest.raises(ConfigError, match="there is no bucket nowhere"):
        store_at("s3://nowhere/x", lease_ttl_s=30.0).open("stage-1", KEY).__enter__()
    child = """
from agentgym.store.runstore import store_at
try:
    store_at("s3://tests/x", lease_ttl_s=30.0).heads()
except ValueError as error:
    print(type(error).__name__, error)
"""
    for before, expected in (
        (
            "import os\ndel os.environ['AWS_ACCESS_KEY_ID']\n",
            "ConfigError store.uri: no credentials for s3://tests/x/steps/ ",
        ),
        (
            "import os\nos.environ['AWS_PROFILE'] = 'nobody'\n",
            "ConfigError store.uri: the AWS settings of this shell cannot be used: ",
        ),
        (
            "import sys\nsys.modules['boto3'] = None\n",
            "ConfigError store.uri needs boto3; run `pip install -e '.[s3]'`",
        ),
    ):
        environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
        done = completed(sys.executable, "-c", before + child, env=environment)
        assert done.stdout.startswith(expected), done.stdout + done.stderr


def test_a_store_on_disk_needs_no_boto3():
    script = (
        "import sys; sys.modules['boto3'] = sys.modules['botocore'] = None\n"
        "from agentgym.config import load_config\nfrom agentgym.pipeline.run import open_store\n"
        "print(open_store(load_config('params.yaml')).root)"
    )
    done = completed(sys.executable, "-c", script)
    assert done.stdout.strip() == ".agentgym/store", done.stderr
