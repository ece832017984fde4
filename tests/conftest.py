"""How the tests are run, and what many of them begin with: a tiny tokenizer and tiny models, real
ones, a store, an MLflow database, a DVC project. Servers: tests/servers.py.
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

# a shell's background job ignores Ctrl-C, and so would every program the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# nor is time spent on looking for garbage among what imports leave: agentgym/defaults.py
gc.set_threshold(100_000, 50, 100)

# nor on making the code of Java processes fast that a test ends after a few games
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
SHARING = ("tests/envs/sciworld/",)
PROCESSES = ("tests/flows/", "tests/newcomer/", "tests/services/")
ROOT = Path(__file__).parents[1]
SUITE = ROOT / "docs/results/suite.json"


def pytest_sessionfinish():
    """Pytest and then Python would look for garbage among all that tests left, seconds of it."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in a loop of its own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        asyncio.run(pyfuncitem.obj(**arguments))
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several test processes one gets a whole file: its tests share what they prepare."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by the number of tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByFile(config, log)


def file_of(nodeid):
    return nodeid.partition("::")[0]


def group_of(nodeid):
    """The tests that one process runs: of a file, or of a folder that shares a Java process."""
    return next((folder for folder in SHARING if nodeid.startswith(folder)), file_of(nodeid))


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config, items):
    """Marks what starts processes or trains, and has what takes longest begin first where several
    processes share the work: none is left to one of them at the end. Of those that wait for one
    finished run, a single one is among the first: the others would wait beside it.
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
        for item in items:  # what starts processes and was not measured yet may take long
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
    """A folder of all test processes."""
    own = tmp_path_factory.getbasetemp()
    shares = "PYTEST_XDIST_WORKER" in os.environ or "AGENTGYM_TEST_SHARED" in os.environ
    return own.parent if shares else own


def pytest_runtest_setup(item):
    imported = sys.modules.get("torch")
    if imported and imported.get_num_threads() != 1:
        imported.set_num_threads(1)  # a command that ran in this process set its own number
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def once(of_all_processes):
    """once(name, build) -> the folder that build(folder) filled, by whichever of the test
    processes came first. Copy it, leave it whole.
    """

    def make(name, build):
        shared = of_all_processes
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


def _stands_still(pid):
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # of a thread that ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)


@pytest.fixture(scope="session")
def stand_still():
    """stand_still(pid, SIGSTOP or SIGKILL): stop or end that process, and come back when each of
    its threads has. They do so one after another: on a busy machine one may well answer after it.
    """

    def stop(pid, number=signal.SIGSTOP):
        os.kill(pid, number)
        wait_until(lambda: _stands_still(pid), 30, why=lambda: f"{pid} goes on")

    return stop


@pytest.fixture(scope="session")
def keep(tmp_path_factory):
    """keep(snapshot or {name: bytes}, more) -> (store, the manifest of a commit of that)."""
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


def forget_artifacts():
    """Make MLflow look again where a run's artifacts lie: it caches that by the run's id, which
    copies of a folder share.
    """
    if mlflow := sys.modules.get("mlflow.tracking._tracking_service.utils"):
        mlflow._artifact_repos_cache.clear()


@pytest.fixture(scope="session")
def move_artifacts():
    """move_artifacts(database, old, new): the MLflow database of a copied folder names the
    artifacts of the copy. Otherwise a run that goes on in the copy writes into the original.
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
