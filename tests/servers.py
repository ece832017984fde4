"""Real servers for tests: clusters, MLflow, Postgres, S3, a Hub, OpenEnv, environment servers; and
checks for the programs that they need.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.answering import http_server
from tests.waiting import text_of

ROOT = Path(__file__).parents[1]


def skip_without(find):
    """Skip the test if `find` raises ValueError; raise it if AGENTGYM_TEST_ALL is set."""
    try:
        find()
    except ValueError as error:
        if os.environ.get("AGENTGYM_TEST_ALL"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def java():
    from envs.sciworld.jvm import find_java

    skip_without(find_java)


@pytest.fixture(scope="session")
def chromium():
    from envs.webarena.chromium import find_browser

    skip_without(find_browser)


@contextlib.contextmanager
def chromium_browser():
    """Yield a running Chromium. Meanwhile no other event loop can run in this thread."""
    from playwright.sync_api import sync_playwright

    from envs.webarena.chromium import find_browser

    with sync_playwright() as driver:
        options = {"executable_path": find_browser(), "args": ["--no-sandbox"], "timeout": 60_000}
        browser = driver.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium):
    with chromium_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory):
    """Yield the kubeconfig of a real API server: AGENTGYM_TEST_KUBECONFIG, or a control plane that
    the script AGENTGYM_TEST_CONTROL_PLANE starts (`up FOLDER`, `down FOLDER`). It has only one
    hollow node: if several start at once, two can get the same container runtime, and each ends the
    other's pods.
    """
    given = os.environ.get("AGENTGYM_TEST_KUBECONFIG")
    script = os.environ.get("AGENTGYM_TEST_CONTROL_PLANE")
    if given:
        yield Path(given)
    elif script:
        folder = tmp_path_factory.mktemp("control-plane")
        try:
            subprocess.run([script, "up", folder], check=True, timeout=280)
            yield folder / "kubeconfig"
        finally:
            subprocess.run([script, "down", folder], check=False, timeout=60)
    else:
        assert not os.environ.get("AGENTGYM_TEST_ALL"), "AGENTGYM_TEST_KUBECONFIG names no cluster"
        pytest.skip("AGENTGYM_TEST_KUBECONFIG names no cluster")


@pytest.fixture(scope="session")
def kubectl(kubeconfig):
    """kubectl(*arguments, objects or raw) -> its output; objects or raw are its input."""
    from agentgym.deploy.manifests import find_kubectl

    def call(*arguments, objects=None, raw=None):
        if objects:
            raw = {"apiVersion": "v1", "kind": "List", "items": objects}
        done = subprocess.run(
            [find_kubectl(), *arguments],
            input=raw and json.dumps(raw),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture
def api_proxy(kubeconfig, tmp_path):
    """Yield a Proxy (`tests/api_proxy.py`) of the API server; its `kubeconfig` leads through it."""
    from tests.api_proxy import Proxy

    proxy = Proxy(kubeconfig, tmp_path)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def real_nodes(kubeconfig, kubectl, tmp_path_factory):
    """real_nodes(*names, **flags of tests/k8s/node) -> a context: nodes that really run containers,
    {"gateway": this machine's address for their pods, "nodes": {name: process}}.

    Meanwhile, pods only run there. Skips if the cluster has nodes that are not hollow: it is a
    user's cluster, and pods would run on the user's nodes.
    """
    from agentgym.deploy.owned import owned_process, tail

    program = Path(__file__).with_name("k8s") / "node"

    @contextmanager
    def start(*names, **flags):
        hollow = kubectl("get", "nodes", "--output=name").split()

        def check():
            if os.geteuid():
                raise ValueError("nodes of the tests need root, for the networks of their pods")
            if not all(each.startswith("node/hollow-") for each in hollow):
                raise ValueError("nodes of the tests join no cluster that has nodes")

        skip_without(check)
        folder = tmp_path_factory.mktemp("nodes")
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        command = [sys.executable, str(program), *names, f"--kubeconfig={kubeconfig}", *words]
        kubectl("cordon", *hollow)
        try:
            with owned_process(
                [*command, f"--folder={folder}"], log_path=folder / "log", env={}
            ) as process:
                deadline = time.monotonic() + 60
                nodes = [f"node/{name}" for name in names]
                while set(nodes) - set(kubectl("get", "nodes", "--output=name").split()):
                    assert process.poll() is None, tail(folder / "log")
                    assert time.monotonic() < deadline, tail(folder / "log")
                    time.sleep(0.1)
                kubectl("wait", "--for=condition=Ready", *nodes, "--timeout=60s")
                yield json.loads((folder / "nodes.json").read_text())
        finally:
            lost = set(kubectl("get", "nodes", "--output=name").split()) - set(hollow)
            if lost:  # a killed node has not removed its object
                kubectl("delete", *lost)
            kubectl("uncordon", *hollow)

    return start


@pytest.fixture(scope="session")
def mlflow_process():
    """mlflow_process(folder, *words) -> the address of `mlflow WORDS`, once `health` responds.
    `PORT` in a word becomes its port. host: host of that address; more: environment variables.
    """
    from agentgym.deploy.owned import owned_process, tail

    @contextmanager
    def started(folder, *words, host="127.0.0.1", health="/health", timeout_s=180, **more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "mlflow", *(word.replace("PORT", port) for word in words)]
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # mlflow starts uvicorn
        env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PATH": programs, **more}
        with owned_process(command, log_path=folder / "mlflow.log", env=env) as process:
            address, deadline = f"http://{host}:{port}", time.monotonic() + timeout_s
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(address + health, timeout=5).close()
                    break
                assert process.poll() is None, tail(folder / "mlflow.log")
                assert time.monotonic() < deadline, tail(folder / "mlflow.log")
                time.sleep(0.2)
            yield address
            os.killpg(process.pid, signal.SIGKILL)  # on SIGTERM it would wait for our connections

    return started


@pytest.fixture(scope="session")
def mlflow_server(mlflow_process):
    """mlflow_server(folder, *words) -> the address of a server with the folder's database."""

    @contextmanager
    def started(folder, *words, **more):
        database = f"--backend-store-uri=sqlite:///{folder / 'mlflow.db'}"
        server = ("server", "--host=127.0.0.1", "--port=PORT", "--workers=1", database)
        with mlflow_process(folder, *server, *words, **more) as address:
            yield address

    return started


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """Yield a Postgres server on loopback, in which tests make databases."""
    import psycopg2

    from agentgym.deploy.owned import owned_process, tail

    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))

    def check():
        if not programs:
            raise ValueError("no Postgres is installed: apt-get install postgresql")
        if os.geteuid():
            raise ValueError("a Postgres of the tests is started by root, under its own account")

    skip_without(check)
    folder = tmp_path_factory.mktemp("postgres")
    for each in (folder, *folder.parents):  # the server's account needs access
        if each.is_relative_to("/tmp") and each != Path("/tmp"):
            each.chmod(each.stat().st_mode | 0o011)
    shutil.chown(folder, "postgres")
    as_postgres = ("runuser", "-u", "postgres", "--")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = Postgres(free.getsockname()[1])
    data = ("-D", str(folder / "data"))
    made = [*as_postgres, str(programs[-1].with_name("initdb")), "--no-sync", *data]
    subprocess.run(made, check=True, capture_output=True, timeout=120)
    serve = [*as_postgres, str(programs[-1]), *data, "-h", "127.0.0.1", "-p", str(found.port)]
    with owned_process([*serve, "-k", str(folder)], log_path=folder / "log", env={}) as server:
        deadline = time.monotonic() + 60
        while True:
            try:
                found.query("postgres", "select 1")
                break
            except psycopg2.OperationalError:
                assert server.poll() is None, tail(folder / "log")
                assert time.monotonic() < deadline, tail(folder / "log")
                time.sleep(0.1)
        yield found


class Postgres:
    def __init__(self, port):
        self.port = port

    def made(self, database, driver=""):
        """Create a database. Return its URL."""
        self.query("postgres", f"create database {database}")
        return f"postgresql{driver}://postgres@127.0.0.1:{self.port}/{database}"

    def query(self, database, text):
        import psycopg2

        connection = psycopg2.connect(f"postgresql://postgres@127.0.0.1:{self.port}/{database}")
        connection.autocommit = True
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(text)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """Yield the URL of an S3 server (moto), which ends with the tests, even if killed."""
    from agentgym.deploy.owned import owned_process

    folder = tmp_path_factory.mktemp("s3")
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("s3_server.py")),
        str(folder / "port"),
    ]
    with owned_process(command, log_path=folder / "log", env={}) as server:
        yield f"http://127.0.0.1:{text_of(folder / 'port', server, folder / 'log')}"


@pytest.fixture
def s3_uri(s3_endpoint, monkeypatch, tmp_path):
    """s3://bucket/prefix of an empty location on that server; the AWS variables point to the
    server.
    """
    import boto3

    (tmp_path / "aws").touch()  # hide the user's settings
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "aws"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "aws"),
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="tests")
    return f"s3://tests/{secrets.token_hex(8)}"


@pytest.fixture(scope="session")
def openenv(request):
    """openenv(*arguments) -> command and environment of `openenv_peer.py`, with OpenEnv's package
    on the path.

    The package is installed once if AGENTGYM_TEST_ALL is set; otherwise its tests are skipped.
    """
    needed = Path(__file__).with_name("openenv.txt")
    folder = (
        Path(request.config.cache.mkdir("openenv"))
        / hashlib.sha256(needed.read_bytes()).hexdigest()[:16]
    )
    if not folder.exists():
        if not os.environ.get("AGENTGYM_TEST_ALL"):
            pytest.skip("OpenEnv's package is installed where AGENTGYM_TEST_ALL is set")
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(partial),
            "--requirement",
            str(needed),
        ]
        subprocess.run(install, check=True, timeout=240)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)

    def command(*arguments):
        peer = [sys.executable, "-P", str(Path(__file__).with_name("openenv_peer.py")), *arguments]
        return peer, {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}

    return command


@pytest.fixture
def hub(tmp_path):
    """Yield a Hub (`tests/hub.py`) without commits."""
    from tests.hub import Hub

    made = Hub(tmp_path / "hub")
    with http_server(made.answers()) as made.origin:
        yield made


@pytest.fixture(scope="session")
def serving():
    """serving(env, options, **settings) -> (endpoint, sessions) of a real server on loopback, in a
    thread; env: a name or an EnvSpec.
    """
    import uvicorn

    from envs.connection import server_config
    from envs.registry import load_spec
    from envs.server import ServerSettings, make_app

    @contextmanager
    def serve(env="babyai", options=None, **settings):
        spec = load_spec(env, options or {}) if isinstance(env, str) else env
        asked = ServerSettings(**{"drain_timeout_s": 0.1, **settings})
        app = make_app(spec, asked)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(app, asked.max_sessions))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not (server.started and app.state.sessions.ready):
                assert not app.state.sessions.failure
                assert time.monotonic() < deadline, "the server does not become ready"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.sessions
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()

    return serve
