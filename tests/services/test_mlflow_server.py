"""A project's MLflow server: the owner's clients have access, others have none, and its artifacts
stay in their folder.
"""

import json
import os
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from agentgym.deploy.owned import tail
from agentgym.private import new_login, own_login, with_login
from agentgym.store.lease import process_start
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import Point
from services.mlflow_server import LOGIN
from services.proxy import listener
from services.supervisor import Service, healthy

pytestmark = pytest.mark.timeout(300)


class Served:
    def __init__(self, folder):
        self.folder, self.login = folder, new_login()
        self._bound = listener(0)
        self.address = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        command = [sys.executable, "-m", "services.mlflow_server", str(self._bound.fileno())]
        environment = {LOGIN: self.login, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.service = Service("MLflow", command, folder / "log", environment, self._bound)

    def close(self):
        self.service.close()
        self._bound.close()

    def ask(self, path, body=None, method=None, **headers):
        """Send a request with the login. Return (status, text)."""
        headers = {
            "Authorization": f"Basic {b64encode(self.login.encode()).decode()}",
            "Content-Type": "application/json",
            **headers,
        }
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}/{path}",
            data,
            headers,
            method=method or ("PUT" if isinstance(body, bytes) else None),
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / ".agentgym").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
        server = Served(folder)
        try:
            server.service.keep()
            while not healthy(f"{server.address}/health"):
                assert server.service.process.poll() is None, tail(folder / "log")
            says = {
                "pid": os.getpid(),
                "started": process_start(os.getpid()),
                "prefect": "http://127.0.0.1:1",
            }
            (folder / ".agentgym/services.json").write_text(
                json.dumps({**says, "mlflow": server.address, "login": server.login})
            )
            yield server
        finally:
            server.close()


def test_a_run_that_tracks_to_the_projects_own_server_is_let_in(served, tmp_path):
    tracker = Tracker(served.address, "ours", tmp_path)
    run = tracker.parent_run("k" * 64, params={"a": 1}, tags={"seed": "0"})
    tracker.deliver(run, [Point(1, 1000, {"loss": 0.5})])
    tracker.log_artifacts(run, {"notes.txt": b"kept"})
    assert tracker.points(run) == [("loss", 1, 1000, 0.5)]
    (kept,) = (served.folder / ".agentgym/mlflow-artifacts").rglob("notes.txt")
    assert kept.read_bytes() == b"kept"
    assert (
        MlflowClient(with_login(served.address, served.login))
        .get_run(run)
        .info.artifact_uri.startswith("mlflow-artifacts:/")
    )
    anonymous = MlflowClient(served.address)
    with pytest.raises(MlflowException, match=r"401|belongs to one user"):
        anonymous.get_run(run)


def test_a_server_elsewhere_is_never_told_our_login(served, tmp_path):
    other = f"http://127.0.0.1:{int(served.address.rpartition(':')[2]) ^ 1}"
    assert own_login(served.address) == own_login(f"{served.address}/api") == served.login
    assert own_login(other) is None
    assert own_login(served.address.replace("http", "https")) is None
    assert served.login not in str(Tracker(other, "ours", tmp_path).client.tracking_uri)


def escapes(folder):
    outside = folder / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_text("theirs")
    root = folder / ".agentgym/mlflow-artifacts"
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(outside)
    return {
        "path": str(outside),
        "uri": outside.as_uri(),
        "relative": "outside",
        "dots": f"{root}/../../outside",
        "coded": f"file://{root}/%2e%2e/%2e%2e/outside",
        "link": f"{root}/link",
        "proxied": "mlflow-artifacts:/../../outside",
        "proxied, coded": "mlflow-artifacts:/%2e%2e/%2e%2e/outside",
        "another scheme": "s3://bucket/outside",
        "another server": "http://127.0.0.1:1/api/2.0/mlflow-artifacts/artifacts/outside",
    }


@pytest.mark.parametrize(
    "kind",
    [
        "path",
        "uri",
        "relative",
        "dots",
        "coded",
        "link",
        "proxied",
        "proxied, coded",
        "another scheme",
        "another server",
    ],
)
def test_an_experiment_that_lies_outside_the_folder_is_refused(served, kind):
    location = escapes(served.folder)[kind]
    status, said = served.ask(
        "api/2.0/mlflow/experiments/create", {"name": kind, "artifact_location": location}
    )
    assert status == 400, said
    assert "INVALID_PARAMETER_VALUE" in said


@pytest.mark.parametrize("kind", ["uri", "dots", "link"])
def test_one_that_got_into_the_database_another_way_is_neither_read_nor_written(served, kind):
    location = escapes(served.folder)[kind]
    client = MlflowClient(with_login(served.address, served.login))
    experiment = client.create_experiment(f"old {kind}")
    with sqlite3.connect(served.folder / ".agentgym/mlflow.db", timeout=30) as database:
        database.execute(
            "update experiments set artifact_location = ? where experiment_id = ?",
            (location, int(experiment)),
        )
    run = client.create_run(experiment).info.run_id
    with sqlite3.connect(served.folder / ".agentgym/mlflow.db", timeout=30) as database:
        database.execute("update runs set artifact_uri = ? where run_uuid = ?", (location, run))
    for path in (
        f"api/2.0/mlflow/artifacts/list?run_id={run}",
        f"get-artifact?run_uuid={run}&path=secret.txt",
    ):
        status, said = served.ask(path)
        assert (status, "theirs" in said, "secret.txt" in said) == (400, False, False), said
    status, said = served.ask(
        f"ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=new.txt", b"mine"
    )
    assert status in (400, 405), said
    assert os.listdir(served.folder / "outside") == ["secret.txt"]


def test_a_model_version_cannot_name_a_file_of_the_machine(served):
    client = MlflowClient(with_login(served.address, served.login))
    run = client.create_run(client.create_experiment("models")).info.run_id
    client.create_registered_model("model")
    for source in (escapes(served.folder)["uri"], escapes(served.folder)["proxied"], "/etc"):
        body = {"name": "model", "source": source, "run_id": run}
        status, said = served.ask("api/2.0/mlflow/model-versions/create", body)
        assert status == 400, said


def test_a_trace_cannot_lead_to_a_file_of_the_machine(served):
    client = MlflowClient(with_login(served.address, served.login))
    experiment, trace_id = client.create_experiment("traces"), "tr-" + "0" * 32
    outside = Path(escapes(served.folder)["path"])
    (outside / "attachments").mkdir()
    (outside / "traces.json").write_text('{"spans": "theirs"}')
    (outside / "attachments/note").write_text("theirs")
    trace = {
        "trace_id": trace_id,
        "trace_location": {
            "type": "MLFLOW_EXPERIMENT",
            "mlflow_experiment": {"experiment_id": experiment},
        },
        "request_time": "2026-01-01T00:00:00Z",
        "state": "OK",
    }
    status, said = served.ask("api/3.0/mlflow/traces", {"trace": {"trace_info": trace}})
    assert status == 200, said
    tag = {"key": "mlflow.artifactLocation", "value": outside.as_uri()}
    served.ask(f"api/3.0/mlflow/traces/{trace_id}/tags", tag, method="PATCH")
    with sqlite3.connect(served.folder / ".agentgym/mlflow.db", timeout=30) as database:
        known = "update trace_tags set value = ? where request_id = ? and key = ?"
        assert database.execute(known, (tag["value"], trace_id, tag["key"])).rowcount == 1
    for path in ("", "&path=note"):
        status, said = served.ask(
            f"ajax-api/3.0/mlflow/get-trace-artifact?request_id={trace_id}{path}"
        )
        assert (status >= 400, "theirs" in said) == (True, False), said
    for path in ("traces.json", "attachments/note"):
        (outside / path).unlink()
    (outside / "attachments").rmdir()


def test_the_proxy_writes_below_its_folder_alone(served):
    for path in ("../escaped", "..%2fescaped", "%2e%2e/escaped", "a/../../escaped", "/etc/escaped"):
        status, _ = served.ask(f"api/2.0/mlflow-artifacts/artifacts/{path}", b"mine")
        assert status >= 400
    assert not list(served.folder.rglob("escaped"))
    assert served.ask("api/2.0/mlflow-artifacts/artifacts/inside", b"mine")[0] == 200


def test_the_login_is_on_no_command_line_and_leaves_the_servers_environment(served):
    pid = served.service.process.pid
    word = served.login.encode()
    assert word not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert Path(f"/proc/{pid}/environ").stat().st_mode & 0o077 == 0
    assert word not in (served.folder / "log").read_bytes()
    assert (
        subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, check=False
        ).stdout.find(word)
        == -1
    )
