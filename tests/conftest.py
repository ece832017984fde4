"""Test setup and shared fixtures: a tiny tokenizer, tiny and real models, a store, an MLflow
database, a DVC project. Servers: tests/servers.py.
"""

import asyncio
import contextlib
import copy
import fcntl
import gc
import inspect
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

# a shell's background job ignores Ctrl-C, and every child process would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
# collect garbage less often: imports leave many live objects (agentgym/defaults.py)
gc.set_threshold(100_000, 50, 100)

# as for the product's processes: threads that spin while others compute take six times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Java processes end after a few games: do not spend time on optimized code
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")

pytest_plugins = ["tests.deadlines", "tests.servers"]

TEXTS = [
    "you see a red ball",
    "turn left",
    "turn right",
    "move forward",
    "task: go to the red ball 2 steps ahead",
    "invalid action",
] * 3


# fixtures and folders whose tests start processes, train or open a browser: not in `make quick`
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
SHARING = ("tests/envs/sciworld/",)
PROCESSES = ("tests/flows/", "tests/newcomer/", "tests/services/")
ROOT = Path(__file__).parents[1]
SUITE = ROOT / "docs/results/suite.json"


def pytest_sessionfinish():
    """Freeze the heap: pytest and Python would spend seconds on garbage collection at exit."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine test in a new event loop."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        asyncio.run(pyfuncitem.obj(**arguments))
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give whole files to test processes, because a file's tests share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it would order files by their number of tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByFile(config, log)


def file_of(nodeid):
    return nodeid.partition("::")[0]


def group_of(nodeid):
    """Return the file, or the folder that shares a Java process, whose tests run in one process."""
    return next((folder for folder in SHARING if nodeid.startswith(folder)), file_of(nodeid))


def pytest_ignore_collect(collection_path, config):
    """Do not even import folders of integration tests where these are left out."""
    if "not integration" in config.option.markexpr:
        return f"{collection_path.relative_to(ROOT)}/" in PROCESSES or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config, items):
    """Mark tests that start processes or train as integration tests, and order the longest first if
    several processes share the work. Of tests that need one finished run, only one is among the
    first: the others would wait for it.
    """
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a test's name differs between processes: {named[0]}")
    for item in items:
        if INTEGRATION & set(item.fixturenames) or file_of(item.nodeid).startswith(PROCESSES):
            item.add_marker("integration")
    if hasattr(config, "workerinput") and SUITE.exists():
        measured = json.loads(SUITE.read_text())["test"]["files"]
        seconds = dict.fromkeys((group_of(item.nodeid) for item in items), 1.0)
        known = set(map(group_of, measured))
        for item in items:  # a new integration test has no measured time: assume that it is long
            if item.get_closest_marker("integration") and group_of(item.nodeid) not in known:
                seconds[group_of(item.nodeid)] = 60.0
        for file, each in measured.items():
            if group_of(file) in seconds:
                seconds[group_of(file)] += each["seconds"]
        waiting = {group_of(item.nodeid) for item in items if "finished" in item.fixturenames}
        groups = sorted(seconds, key=lambda group: -seconds[group])
        late = [group for group in groups if group in waiting][1:]
        first = [each for each in groups if each not in late][: config.workerinput["workercount"]]
        place = {group: at for at, group in enumerate(dict.fromkeys([*first, *groups]))}
        items.sort(key=lambda item: place[group_of(item.nodeid)])


@pytest.fixture(scope="session")
def of_all_processes(tmp_path_factory):
    """Return the folder that all test processes share."""
    own = tmp_path_factory.getbasetemp()
    shares = "PYTEST_XDIST_WORKER" in os.environ or "AGENTGYM_TEST_SHARED" in os.environ
    return own.parent if shares else own


def pytest_runtest_setup(item):
    imported = sys.modules.get("torch")
    if imported and imported.get_num_threads() != 1:
        imported.set_num_threads(1)  # a command that ran in this process may have changed it
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def once(of_all_processes):
    """once(name, build) -> the folder that build(folder) filled, in the first test process that
    needed it. Copy the folder; do not change it.
    """

    def make(name, build):
        shared = of_all_processes
        folder, done = shared / f"once-{name}", shared / f"once-{name}.done"
        with (shared / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a failed build
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return make


def _stands_still(pid):
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # the thread has ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)


@pytest.fixture(scope="session")
def stand_still():
    """stand_still(pid, SIGSTOP or SIGKILL): send the signal and wait until all threads stopped.
    On a busy machine a thread may still run for a while after the signal.
    """

    def stop(pid, number=signal.SIGSTOP):
        os.kill(pid, number)
        wait_until(lambda: _stands_still(pid), 30, why=lambda: f"{pid} goes on")

    return stop


@pytest.fixture(scope="session")
def keep(tmp_path_factory):
    """keep(snapshot or {name: bytes}, more) -> (store, manifest of a commit with this content)."""
    from agentgym.store.runstore import StorePlace, store_at

    def commit(content, files=None):
        store = store_at(tmp_path_factory.mktemp("kept"), lease_ttl_s=30.0)
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
    """content(learner) -> {name: bytes} of the files of its snapshot."""
    return lambda learner: {
        name: b"".join(file.pieces()) for name, file in learner.snapshot().files.items()
    }


@pytest.fixture(scope="session")
def stored(keep):
    """stored(snapshot, model, or {name: bytes}) -> {name: StoredTensors} of a commit with this
    content. A model gives its weights only, without a mapping.
    """
    from agentgym.models.architecture import ADAPTER, WEIGHTS, files_of
    from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER
    from agentgym.models.model import weights_of
    from agentgym.models.tensorfiles import Snapshot, StoredTensors, TensorFile

    kinds = (WEIGHTS, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, ADAPTER)

    def place(content):
        is_model = hasattr(content, "named_parameters")
        if is_model:
            content = Snapshot({WEIGHTS: TensorFile.of(weights_of(content))})
        store, manifest = keep(content)
        found = {
            name: StoredTensors.of(store, manifest, name)
            for name in kinds
            if files_of(manifest, name)
        }
        return found[WEIGHTS] if is_model else found

    return place


@pytest.fixture(scope="session")
def empty_ledger(once):
    """Return an MLflow database without runs. MLflow creates its tables in a second: copy it."""
    from agentgym.tracking.mlflow import Tracker

    def build(folder):
        assert Tracker(f"sqlite:///{folder / 'mlflow.db'}", "none", folder / "artifacts").client

    return once("ledger", build) / "mlflow.db"


ARTIFACTS = (  # columns of MLflow's database that contain paths of artifacts
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def forget_artifacts():
    """Clear MLflow's cache of artifact locations: its key is the run's id, which copies of a folder
    share.
    """
    if mlflow := sys.modules.get("mlflow.tracking._tracking_service.utils"):
        mlflow._artifact_repos_cache.clear()


@pytest.fixture(scope="session")
def move_artifacts():
    """move_artifacts(database, old, new): change the artifact paths in a copied MLflow database.
    Otherwise a run resumed in the copy would write into the original.
    """

    def move(database, old, new):
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            for table, column in ARTIFACTS:
                for before, after in ((old.as_uri(), new.as_uri()), (str(old), str(new))):
                    connection.execute(
                        f"update {table} set {column} = replace({column}, ?, ?)", (before, after)
                    )
        forget_artifacts()

    return move


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
            context_tokens=512,
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
    """plain(model) -> a copy of the model with Hugging Face's standard attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentgym.models.model import load_weights, weights_of

    def make(model):
        with torch.random.fork_rng():
            config = copy.deepcopy(model.config)  # from_config changes its argument
            twin = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        load_weights(twin, weights_of(model))
        return twin

    return make


@pytest.fixture(scope="session")
def gold():
    """gold(env, task, options) -> (first observation, [(action, result), ...]) of an episode that
    the expert plays.
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
    """Change to an empty DVC project whose folder has its private home; return the project."""
    folder = shutil.copytree(empty_dvc_project, tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(module, source, group, name, value) -> the file of an installed package with one
    module, whose entry point `name` in that group is `value`.
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
