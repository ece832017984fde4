"""A tiny tokenizer and tiny models, real ones; an S3 server, a stand-in for the Hub, a DVC
project, environment servers.
"""

import atexit
import contextlib
import copy
import fcntl
import gc
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

# a shell's background job ignores Ctrl-C, and so would every program the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# nor is time spent on looking for garbage among what imports leave: agentgym/defaults.py
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

# nor on making the code of Java processes fast that a test ends after a few games
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")

TEXTS = [
    "you see a red ball",
    "turn left",
    "turn right",
    "move forward",
    "task: go to the red ball 2 steps ahead",
    "invalid action",
] * 3


def skip_without(find):
    """Skips where `find` raises ValueError, unless everything must run."""
    try:
        find()
    except ValueError as error:
        if os.environ.get("AGENTGYM_TEST_ALL"):
            raise
        pytest.skip(str(error))


# fixtures and rooms whose tests start processes, train or open a browser: not of `make quick`
INTEGRATION = {
    "chromium",
    "dvc_project",
    "empty_dvc_project",
    "hub",
    "java",
    "kubeconfig",
    "openenv",
    "ray_cluster",
    "s3_endpoint",
    "whole_run",
}
PROCESSES = ("tests/flows/", "tests/services/")
ROOT = Path(__file__).parents[1]
SUITE = ROOT / "docs/results/suite.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several test processes one gets a whole file: its tests share what they prepare."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by the number of tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.partition("::")[0]

    return ByFile(config, log)


COLLECTED = pytest.StashKey[list[pytest.Item]]()  # before marks select


def from_file(name):
    """A module that lies beside this one."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def file_of(item):
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config, items):
    """Marks what starts processes or trains, and has the longest file begin first where several
    processes share the work: none is left to one of them at the end. Of those that wait for one
    finished run, a single one is among the first: the others would wait beside it.
    """
    config.stash[COLLECTED] = list(items)
    for item in items:
        if INTEGRATION & set(item.fixturenames) or file_of(item).startswith(PROCESSES):
            item.add_marker("integration")
    if hasattr(config, "workerinput") and SUITE.exists():
        seconds = json.loads(SUITE.read_text())["test"]["files"]
        waiting = {file_of(item) for item in items if "finished" in item.fixturenames}
        files = sorted(
            dict.fromkeys(map(file_of, items)),
            key=lambda file: -seconds.get(file, {"seconds": 1.0})["seconds"],
        )
        late = [file for file in files if file in waiting][1:]
        first = [file for file in files if file not in late][: config.workerinput["workercount"]]
        place = {file: at for at, file in enumerate(dict.fromkeys([*first, *files]))}
        items.sort(key=lambda item: place[file_of(item)])


@pytest.fixture(scope="session")
def num_tests(request):
    """How many tests `make test` has. Skips where not all files were collected."""
    items = request.config.stash[COLLECTED]
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    if not files <= {file_of(item) for item in items}:
        pytest.skip("a part of the tests is run alone")
    left_out = ("slow", "gpu", "ray", "vllm", "kubernetes")
    return sum(not any(map(item.get_closest_marker, left_out)) for item in items)


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory):
    """The kubeconfig of a real API server: that of AGENTGYM_TEST_KUBECONFIG, or of a control plane
    that the script AGENTGYM_TEST_CONTROL_PLANE starts (`up FOLDER NODES`, `down FOLDER`).
    """
    given = os.environ.get("AGENTGYM_TEST_KUBECONFIG")
    script = os.environ.get("AGENTGYM_TEST_CONTROL_PLANE")
    if given:
        yield Path(given)
    elif script:
        folder = tmp_path_factory.mktemp("control-plane")
        try:
            subprocess.run([script, "up", folder, "3"], check=True, timeout=280)
            yield folder / "kubeconfig"
        finally:
            subprocess.run([script, "down", folder], check=False, timeout=60)
    else:
        assert not os.environ.get("AGENTGYM_TEST_ALL"), "AGENTGYM_TEST_KUBECONFIG names no cluster"
        pytest.skip("AGENTGYM_TEST_KUBECONFIG names no cluster")


@pytest.fixture(scope="session")
def kubectl(kubeconfig):
    """kubectl(*arguments, objects or raw) -> what it prints; those are sent to its input."""
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
    """A `tests/api_proxy.py` Proxy of the API server; its `kubeconfig` leads through it."""
    proxy = from_file("api_proxy").Proxy(kubeconfig, tmp_path)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def real_nodes(kubeconfig, kubectl, tmp_path_factory):
    """real_nodes(*names, **flags of tests/k8s/node) -> a context: nodes that run containers for
    real, {"gateway": this machine's address for their pods, "nodes": {name: process}}.

    Pods go there and nowhere else meanwhile. Skips where nodes are other than hollow: somebody's
    own cluster has nodes, and these would be none of it.
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
            if lost:  # nobody was left to remove them
                kubectl("delete", *lost)
            kubectl("uncordon", *hollow)

    return start


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all test processes."""
    own = tmp_path_factory.getbasetemp()
    shares = "PYTEST_XDIST_WORKER" in os.environ or "AGENTGYM_TEST_SHARED" in os.environ
    return own.parent if shares else own


@pytest.fixture(scope="session")
def forks(shared):
    """A `tests/forks.py` Forks: Python commands that begin with what takes seconds to import."""
    begun = from_file("forks").Forks(shared / "forks")
    yield begun
    begun.close()


@pytest.fixture(scope="session")
def once(shared):
    """once(name, build) -> the folder that build(folder) filled, by whichever of the test
    processes came first. Copy it, leave it whole.
    """

    def make(name, build):
        folder, done = shared / f"once-{name}", shared / f"once-{name}.done"
        with (shared / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def keep(tmp_path_factory):
    """keep(snapshot or {name: bytes}, more) -> (store, the manifest of a commit of that)."""
    from agentgym.store.place import StorePlace
    from agentgym.store.posix import posix_store

    def commit(content, files=None):
        store = posix_store(tmp_path_factory.mktemp("kept"), lease_ttl_s=30.0)
        with store.open("kept", "5" * 64) as writer:
            if hasattr(content, "write"):
                content = content.write(StorePlace.of(store), "kept", "5" * 64)
            manifest = writer.commit(
                done=True,
                state={},
                parents={},
                config={},
                blobs={**content, **(files or {})},
                records={},
                results={},
                timings={},
            )
        return store, manifest

    return commit


@pytest.fixture(scope="session")
def content():
    """content(learner) -> the files of a commit of it, whole, by name."""
    return lambda learner: {
        name: b"".join(file.pieces()) for name, file in learner.snapshot().files.items()
    }


@pytest.fixture(scope="session")
def stored(keep):
    """stored(snapshot, model, or {name: bytes}) -> {name: StoredTensors} of a commit of that; of
    a model its weights alone, not in a mapping.
    """
    from agentgym.models import checkpoint
    from agentgym.models.model import weights_of
    from agentgym.models.tensorfiles import Snapshot, StoredTensors, TensorFile, files_of

    kinds = (
        checkpoint.WEIGHTS,
        checkpoint.OPTIMIZER,
        checkpoint.CRITIC,
        checkpoint.CRITIC_OPTIMIZER,
        checkpoint.ADAPTER,
    )

    def place(content):
        is_model = hasattr(content, "named_parameters")
        if is_model:
            content = Snapshot({checkpoint.WEIGHTS: TensorFile.of(weights_of(content))})
        store, manifest = keep(content)
        found = {
            name: StoredTensors.of(store, manifest, name)
            for name in kinds
            if files_of(manifest, name)
        }
        return found[checkpoint.WEIGHTS] if is_model else found

    return place


@pytest.fixture(scope="session")
def empty_ledger(once):
    """An MLflow database without runs: its tables take MLflow a second, so tests copy it."""
    from agentgym.tracking.mlflow import Tracker

    def build(folder):
        assert Tracker(f"sqlite:///{folder / 'mlflow.db'}", "none", folder / "artifacts").client

    return once("ledger", build) / "mlflow.db"


ARTIFACTS = (  # where MLflow says that one lies
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


@pytest.fixture(scope="session")
def move_artifacts():
    """move_artifacts(database, old, new): the MLflow database of a copied folder names the
    artifacts of the copy. Otherwise a run that goes on in the copy writes into the original.
    """

    def move(database, old, new):
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            for table, column in ARTIFACTS:
                connection.execute(
                    f"update {table} set {column} = replace({column}, ?, ?)", (str(old), str(new))
                )
        if mlflow := sys.modules.get("mlflow.tracking._tracking_service.utils"):
            mlflow._artifact_repos_cache.clear()  # by a run's id, which both folders have

    return move


@pytest.fixture(scope="session")
def mlflow_process():
    """mlflow_process(folder, *words) -> the address of `mlflow WORDS`, once it answers at `health`;
    `PORT` in a word is its port. host: the name in that address; more: of its environment.
    """
    from agentgym.deploy.owned import owned_process, tail

    @contextmanager
    def started(folder, *words, host="127.0.0.1", health="/health", timeout_s=180, **more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "mlflow", *(word.replace("PORT", port) for word in words)]
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # uvicorn, by its name
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
            os.killpg(process.pid, signal.SIGKILL)  # it would wait for connections of ours

    return started


@pytest.fixture(scope="session")
def mlflow_server(mlflow_process):
    """mlflow_server(folder, *words) -> the address of a server of the folder's database."""

    @contextmanager
    def started(folder, *words, **more):
        database = f"--backend-store-uri=sqlite:///{folder / 'mlflow.db'}"
        server = ("server", "--host=127.0.0.1", "--port=PORT", "--workers=1", database)
        with mlflow_process(folder, *server, *words, **more) as address:
            yield address

    return started


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """A Postgres on loopback, for databases of one's own."""
    import psycopg2

    from agentgym.deploy.owned import owned_process, tail

    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        pytest.skip("no Postgres is installed: apt-get install postgresql")
    if os.geteuid():
        pytest.skip("a Postgres of the tests is started by root, under its own account")
    folder = tmp_path_factory.mktemp("postgres")
    for each in (folder, *folder.parents):  # its account has to get there
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
        """The URL of a new database."""
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
def java():
    from envs.sciworld.jvm import find_java

    skip_without(find_java)


@pytest.fixture(scope="session")
def chromium():
    from envs.webarena.chromium import find_browser

    skip_without(find_browser)


@pytest.fixture(scope="session")
def tokenizer():
    from agentgym.models.model import set_threads, train_tokenizer

    set_threads()
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="session")
def make_model(tokenizer):
    """make_model(seed) -> a Qwen2 of 2 layers whose distributions are far from uniform."""
    import torch

    from agentgym.config import ModelConfig
    from agentgym.models.model import new_model

    def make(seed=0):
        config = ModelConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            mlp_size=96,
            context_tokens=256,
        )
        model = new_model(
            config,
            vocab_size=len(tokenizer),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            seed=seed,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)  # initial weights of 0.02 would hide a wrong mask or position
        return model

    return make


@pytest.fixture(scope="session")
def plain():
    """plain(model) -> the same weights under Hugging Face's own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentgym.models.model import load_weights, weights_of

    def make(model):
        with torch.random.fork_rng():
            config = copy.deepcopy(model.config)  # from_config writes the attention into it
            twin = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        load_weights(twin, weights_of(model))
        return twin

    return make


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """URL of a running S3 server (moto); it ends with the tests, however they end."""
    from agentgym.deploy.owned import owned_process, tail

    folder = tmp_path_factory.mktemp("s3")
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("s3_server.py")),
        str(folder / "port"),
    ]
    with owned_process(command, log_path=folder / "log", env={}) as server:
        deadline = time.monotonic() + 120
        while not (folder / "port").exists():
            assert server.poll() is None, tail(folder / "log")
            assert time.monotonic() < deadline, tail(folder / "log")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}"


@pytest.fixture
def s3_uri(s3_endpoint, monkeypatch, tmp_path):
    """s3://bucket/prefix of an empty place on that server; the environment names the server, as
    AWS programs read it.
    """
    import boto3

    (tmp_path / "aws").touch()  # nobody's own settings
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
    """openenv(*arguments) -> command and environment of `openenv_peer.py`, in a process whose path
    has OpenEnv's package.

    It is installed once, where everything must run; elsewhere its tests are skipped.
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
        with contextlib.suppress(OSError):  # another process has been faster
            partial.rename(folder)

    def command(*arguments):
        peer = [sys.executable, "-P", str(Path(__file__).with_name("openenv_peer.py")), *arguments]
        return peer, {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}

    return command


@pytest.fixture(scope="session")
def gold():
    """gold(env, task, options) -> (what is shown at reset, [(action, result), ...]) of an
    episode an expert plays alone.
    """
    from envs.registry import load_spec

    def play(name, task_id, options=None):
        simulator = load_spec(name, options or {}).make()
        first, expert, turns = simulator.reset(task_id), simulator.expert(), []
        while not turns or not turns[-1][1].terminated:
            action = expert.next_action()
            turns.append((action, simulator.step(action)))
            assert len(turns) < 200
        assert turns[-1][1].success
        return first, turns

    return play


@pytest.fixture
def hub(tmp_path):
    """A `tests/hub.py` Hub without commits."""
    served = from_file("hub").Hub(tmp_path / "hub")
    yield served
    served.stop()


@pytest.fixture(scope="session")
def empty_dvc_project(once):
    from agentgym.data.published import run_dvc

    def build(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            subprocess.run(["git", "init", "-q"], check=True)
            run_dvc("init", "-q", timeout_s=120)
            settings = (
                "analytics = false",
                "check_update = false",
                "site_cache_dir = .dvc/tmp/site",
            )
            Path(".dvc/config").write_text(
                "[core]\n" + "".join(f"    {each}\n" for each in settings)
            )

    return once("dvc", build)


@pytest.fixture
def dvc_project(empty_dvc_project, tmp_path, monkeypatch):
    """The working directory: an empty DVC project, with a home of its own."""
    folder = shutil.copytree(empty_dvc_project, tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


@pytest.fixture(scope="session")
def serving():
    """serving(env, options, **settings) -> (endpoint, sessions) of a real server on loopback,
    in a thread; env: a name or an EnvSpec.
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


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(module, source, group, name, value) -> its file: a package of one module, whose
    entry point `name` of that group is `value`.
    """
    from agentgym.store.keys import source_digest

    forget = source_digest.__globals__["_digest_once"].cache_clear
    modules = []

    def place(module, source, group, name, value):
        site = tmp_path / "site"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        file = site / f"{module}.py"
        file.write_text(source)
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        return file

    yield place
    for module in modules:
        sys.modules.pop(module, None)
    forget()
