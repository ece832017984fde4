"""A cluster's servers as their pods start them: they require a login, and `set-up` prepares
them.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.deploy.kube.client import Kind, connect
from agentgym.deploy.owned import owned_process, tail
from services.pods import deployments, job_template, main, mlflow_environment, rollout_login

ROOT = Path(__file__).parents[2]
PASSWORD = secrets.token_hex(16)
LOGIN = f"agentgym:{PASSWORD}"


@pytest.mark.parametrize("login", ["", "agentgym", "agentgym:short"])
def test_a_server_does_not_start_without_a_login(monkeypatch, capsys, login):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", login)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    assert main(["prefect", "--port", "1"]) == 2
    assert main(["mlflow", "--port", "1"]) == 2
    said = capsys.readouterr().err
    assert "PREFECT_SERVER_API_AUTH_STRING must be user:password" in said
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in said


def test_set_up_needs_an_image_and_a_login(monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", LOGIN)
    monkeypatch.delenv("AGENTGYM_IMAGE", raising=False)
    assert main(["set-up"]) == 2
    assert "AGENTGYM_IMAGE names no image" in capsys.readouterr().err


def test_mlflows_logins_are_a_file_of_the_owners_alone(tmp_path):
    login = {"MLFLOW_TRACKING_USERNAME": "flow", "MLFLOW_TRACKING_PASSWORD": "50%" + PASSWORD}
    backend = {"MLFLOW_BACKEND_STORE_URI": "sqlite:////state/mlflow.db"}
    made = mlflow_environment(tmp_path, {**login, **backend})
    path = Path(made["MLFLOW_AUTH_CONFIG_PATH"])
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "admin_username = flow" in text
    assert f"admin_password = 50%{PASSWORD}" in text
    assert "database_uri = sqlite:////state/logins.db" in text
    assert "auth_cache_ttl_seconds = 60" in text  # not checked at every request
    assert len(made["MLFLOW_FLASK_SERVER_SECRET_KEY"]) == 64
    postgres = {"MLFLOW_BACKEND_STORE_URI": "postgresql://u:p@db/mlflow"}
    mlflow_environment(tmp_path, {**login, **postgres})
    assert "database_uri = postgresql://u:p@db/mlflow" in path.read_text()
    with pytest.raises(ConfigError, match="everybody could write"):
        mlflow_environment(tmp_path, backend)


def test_rollout_workers_are_another_user_than_mlflows_administrator():
    own = {"MLFLOW_TRACKING_USERNAME": "flow", "MLFLOW_ROLLOUT_PASSWORD": PASSWORD}
    assert rollout_login({}) is None
    assert rollout_login({**own, "MLFLOW_ROLLOUT_USERNAME": "rollout"}) == ("rollout", PASSWORD)
    short = {"MLFLOW_ROLLOUT_USERNAME": "rollout", "MLFLOW_ROLLOUT_PASSWORD": "short"}
    for wrong in (own, {**own, "MLFLOW_ROLLOUT_USERNAME": "flow"}, {**own, **short}):
        with pytest.raises(ConfigError, match="must be another user than MLFLOW_TRACKING_USERNAME"):
            rollout_login(wrong)


def test_set_up_deploys_what_prefect_yaml_has_for_a_cluster(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = ["pipeline", "prepare", "train", "evaluate", "compare"]
    assert deployments() == [f"{name}/kubernetes" for name in names]
    assert job_template("other")["variables"]["properties"]["namespace"]["default"] == "other"
    assert job_template("")["variables"]["properties"]["namespace"]["default"] == "agentgym-flows"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def asked(url, login="", body=None):
    """Send a request. Return (status, body)."""
    headers = {"Content-Type": "application/json"}
    if login:
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    request = urllib.request.Request(url, body and json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def wait_for(url, server, log):
    deadline = time.monotonic() + 400
    while True:
        assert server.poll() is None, tail(log)
        assert time.monotonic() < deadline, tail(log)
        try:
            if asked(url)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.3)


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    """Yield (API, environment of its clients) of a Prefect server after `set-up`."""
    folder, port = tmp_path_factory.mktemp("prefect"), free_port()
    own = {
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_HOME": str(folder / "state"),
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "ui"),
    }
    command = [sys.executable, "-m", "services.pods", "prefect", "--port", str(port)]
    with owned_process(command, log_path=folder / "log", env=own) as server:
        api = f"http://127.0.0.1:{port}/api"
        wait_for(f"{api}/health", server, folder / "log")
        client = {
            **os.environ,
            "PREFECT_API_URL": api,
            "PREFECT_API_AUTH_STRING": LOGIN,
            "PREFECT_HOME": str(folder / "client"),
            "AGENTGYM_IMAGE": "registry/agentgym:1",
        }
        yield api, client


@pytest.fixture(scope="module")
def set_up(prefect):
    """set_up(namespace): prepare the server as the image does."""

    def call(namespace=""):
        done = subprocess.run(
            [sys.executable, "-m", "services.pods", "set-up"],
            cwd=ROOT,
            env={**prefect[1], "AGENTGYM_NAMESPACE": namespace},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return prefect

    return call


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_prefect_answers_nobody_without_its_login_and_has_what_set_up_brought(set_up):
    api, _ = set_up()
    assert asked(f"{api}/deployments/name/pipeline/kubernetes")[0] == 401
    assert asked(f"{api}/deployments/name/pipeline/kubernetes", "agentgym:wrong")[0] == 401
    status, body = asked(f"{api}/deployments/name/pipeline/kubernetes", LOGIN)
    deployment = json.loads(body)
    assert status == 200
    assert deployment["work_pool_name"] == "kubernetes"
    assert deployment["job_variables"]["image"] == "registry/agentgym:1"
    assert deployment["job_variables"]["env"]["AGENTGYM_IMAGE"] == "registry/agentgym:1"
    found = json.loads(asked(f"{api}/automations/filter", LOGIN, {})[1])
    assert "agentgym: a crashed run goes on" in [each["name"] for each in found]


@pytest.mark.kubernetes
@pytest.mark.timeout(900)
def test_a_real_worker_makes_a_job_of_a_flow_run_and_of_a_cancelled_one_none_is_left(
    set_up, kubeconfig, tmp_path
):
    namespace = f"agentgym-flows-{secrets.token_hex(4)}"
    kube = connect(kubeconfig=kubeconfig, namespace=namespace)
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "agentgym-flow"}}
    kube.create(account)
    _, client = set_up(namespace)
    settings = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET"
    own = {
        **client,
        "KUBECONFIG": str(kubeconfig),
        f"{settings}_NAME": "agentgym-prefect",
        f"{settings}_KEY": "PREFECT_API_AUTH_STRING",
        "PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES": namespace,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "AGENTGYM_NAMESPACE": namespace,
    }
    jobs = Kind("batch/v1", "Job")
    command = [sys.executable, "-m", "services.pods", "worker"]
    try:
        with owned_process(command, log_path=tmp_path / "log", env=own) as worker:
            run = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run"]
            run += ["pipeline/kubernetes"]
            done = subprocess.run(run, env=client, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            job = until(lambda: kube.list(jobs).items, worker, tmp_path / "log")[0]
            pod = job["spec"]["template"]
            (container,) = pod["spec"]["containers"]
            assert pod["metadata"]["labels"]["agentgym.io/role"] == "flow"
            assert container["image"] == "registry/agentgym:1"
            assert container["args"][:3] == ["prefect", "flow-run", "execute"]
            logins = [e for e in container["env"] if e["name"] == "PREFECT_API_AUTH_STRING"]
            (login,) = logins
            assert login["valueFrom"]["secretKeyRef"]["name"] == "agentgym-prefect"
            assert PASSWORD not in json.dumps(job)
            # its pod cannot start because its claim does not exist
            run = job["metadata"]["labels"]["prefect.io/flow-run-id"]
            cancel = [sys.executable, "-m", "prefect", "flow-run", "cancel", run]
            subprocess.run(cancel, env=client, check=True, timeout=120)
            until(lambda: not kube.list(jobs).items, worker, tmp_path / "log")
            until(lambda: state_of(client, run) == "CANCELLED", worker, tmp_path / "log")
    finally:
        kube.delete(Kind("v1", "Namespace"), namespace)
        kube.close()


def state_of(client, run):
    return json.loads(asked(f"{client['PREFECT_API_URL']}/flow_runs/{run}", LOGIN)[1])["state_type"]


def until(what, worker, log):
    deadline = time.monotonic() + 180
    while not (found := what()):
        assert worker.poll() is None, tail(log)
        assert time.monotonic() < deadline, tail(log)
        time.sleep(0.5)
    return found


@pytest.mark.slow
def test_mlflow_asks_for_its_login_and_passes_artifacts_on(s3_uri, tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "flow")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    rollout = secrets.token_hex(16)
    own = {
        "MLFLOW_ROLLOUT_USERNAME": "rollout",
        "MLFLOW_ROLLOUT_PASSWORD": rollout,
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": f"{s3_uri}/artifacts",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "services.pods", "mlflow", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with owned_process(command, log_path=tmp_path / "log", env=own) as server:
        wait_for(f"{url}/health", server, tmp_path / "log")
        search = f"{url}/api/2.0/mlflow/experiments/search?max_results=1"
        assert asked(search)[0] == 401
        assert asked(search, "flow:wrong")[0] == 401
        assert asked(search, f"flow:{PASSWORD}")[0] == 200
        # the client has no credentials of the store and needs none
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=url)
        run = client.create_run(client.create_experiment("tried"))
        (tmp_path / "a.txt").write_text("kept")
        client.log_artifact(run.info.run_id, str(tmp_path / "a.txt"))
        assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["a.txt"]
        assert not list(tmp_path.rglob("artifacts/**/a.txt"))
        # a rollout worker writes into the flow's experiment, but has no other permissions
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "rollout")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", rollout)
        client.log_metric(client.create_run(run.info.experiment_id).info.run_id, "reward", 1.0)
        login, api = f"rollout:{rollout}", f"{url}/api/2.0/mlflow"
        user = {"username": "more", "password": PASSWORD}
        experiment = {"experiment_id": run.info.experiment_id}
        assert asked(f"{api}/users/create", login, user)[0] == 403
        assert asked(f"{api}/experiments/delete", login, experiment)[0] == 403


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prefect_keeps_its_runs_in_postgres(postgres, tmp_path):
    port = free_port()
    own = {
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_HOME": str(tmp_path / "state"),
        "PREFECT_API_DATABASE_CONNECTION_URL": postgres.made("prefect", "+asyncpg"),
    }
    command = [sys.executable, "-m", "services.pods", "prefect", "--port", str(port)]
    with owned_process(command, log_path=tmp_path / "log", env=own) as server:
        api = f"http://127.0.0.1:{port}/api"
        wait_for(f"{api}/health", server, tmp_path / "log")
        assert asked(f"{api}/work_pools/", LOGIN, {"name": "kept", "type": "kubernetes"})[0] == 201
    assert postgres.query("prefect", "select name from work_pool") == [("kept",)]
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mlflow_keeps_its_runs_and_logins_in_postgres(postgres, tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "flow")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    own = {
        "MLFLOW_BACKEND_STORE_URI": postgres.made("mlflow"),
        "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "services.pods", "mlflow", "--port", str(port)]
    with owned_process(command, log_path=tmp_path / "log", env=own) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
        client.create_run(client.create_experiment("tried"))
    found = postgres.query("mlflow", "select name from experiments order by name")
    assert found == [("Default",), ("tried",)]
    assert postgres.query("mlflow", "select username from users") == [("flow",)]
    assert not list(tmp_path.rglob("*.db"))
