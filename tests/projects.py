"""A clone of this repository with a run small enough for a test: fixtures of tests/flows and
tests/newcomer.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import yaml

import agentgym.pipeline.run as pipeline_run
import flows  # noqa: F401 (says where Prefect keeps its state, before a test imports it)
from agentgym.cli import main as agentgym
from agentgym.config import load_config
from agentgym.pipeline.table import finished as finished_steps
from agentgym.pipeline.table import open_store, steps_of
from tests.conftest import forget_artifacts

ROOT = Path(__file__).parents[1]
TINY = {
    "model": {"hidden_size": 32, "num_heads": 1, "num_kv_heads": 1, "mlp_size": 64},
    "warm_start": {"num_demos": 60, "steps": 40, "batch_size": 16},
    "rollout": {"items_per_step": 4, "group_size": 4},
    "horizon": {"stage_steps": [1, 1, 2]},
    "validation": {"every": 2, "num_items": 4},
    "alarms": {"entropy": {"min": 10.0}},  # every step violates this limit
    "evaluation": {"num_items": 8, "num_samples": 2, "k": [1, 2]},
    "gate": {"min_success": 0.0},
}
SHORT_RUN = (  # overrides for a run with one optimizer step
    *("rollout.items_per_step=2", "horizon.kind=fixed", "horizon.max_turns=[4]"),
    *("horizon.stage_steps=[1]", "validation.every=0"),
    *("evaluation.num_items=2", "evaluation.num_samples=1", "evaluation.k=[1]"),
)


class TaskRun(NamedTuple):
    began: str  # times sort as texts
    ended: str
    waited_for: set[str]


class Project:
    """A clone and commands in it. `agentgym` commands run in this process, unless
    `is_separate`; all others in a new one.
    """

    is_separate = False

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "DVC_", "MLFLOW_", "HF_", "MPL", "MAKE", "MFLAGS"))
        }
        self.environment = {
            **inherited,
            "HOME": str(home),
            "PWD": str(folder),  # set by a shell; prefect.yaml reads it
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
        }

    def run(self, *command, timeout=600):
        if command[0] == "agentgym" and not self.is_separate:
            return self.call(agentgym, *command[1:])
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def call(self, main, *words, output=io.StringIO):
        """Run a command's main function in this process. Return it completed. output: class of its
        standard output.
        """
        out, err = output(), io.StringIO()
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.chdir(self.folder)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            stack.callback(logging.root.setLevel, logging.root.level)
            stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            patch.setattr(logging.root, "handlers", [])  # the command logs to the patched stderr
            patch.setattr(sys, "stdin", stack.enter_context(open(os.devnull)))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            forget_artifacts()
            try:
                code = main([str(word) for word in words])
            except SystemExit as ended:
                code = ended.code
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def pipeline(self, *overrides):
        return self.run("python", "-m", "flows.pipeline", *overrides)

    def start(self, *command):
        """Start a process with stderr redirected to its stdout."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def manifests(self):
        """{path: bytes} of every commit of a step in the store, without the manifests of runs'
        requests.
        """
        return {
            path: path.read_bytes()
            for path in (self.folder / ".agentgym/store").glob("steps/*/manifests/*.json")
            if not path.parts[-3].startswith("runs-")
        }

    def task_runs(self):
        """Return {name: task run} from Prefect's database."""
        database = self.folder / ".agentgym/prefect/prefect.db"
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            rows = connection.execute(
                "select id, name, start_time, end_time, task_inputs from task_run"
            ).fetchall()
        names = {id_.replace("-", ""): name for id_, name, *_ in rows}
        return {
            name: TaskRun(
                start,
                end,
                {
                    names[each["id"].replace("-", "")]
                    for each in json.loads(said).get("wait_for", ())
                },
            )
            for _, name, start, end, said in rows
        }

    def told_in_prefect(self, table, column):
        """Return all texts of a column of Prefect's database."""
        database = self.folder / ".agentgym/prefect/prefect.db"
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return [text for (text,) in connection.execute(f"select {column} from {table}")]

    def exported_model(self):
        """Copy the registered model to an ordinary folder, as a user would have one: every file of
        a registered version has a digest.
        """
        found = sorted((self.folder / ".agentgym/mlflow-artifacts").rglob("config.json"))
        model = found[0].parent
        tokenizer = next(path.parent for path in model.parent.rglob("tokenizer.json"))
        place = self.folder / ".agentgym/exported-model"
        for each in (model, tokenizer):
            shutil.copytree(each, place, dirs_exist_ok=True)
        return place

    def processes(self):
        """Return the command lines of all processes in this project."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if (entry / "cwd").resolve() == self.folder.resolve():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except OSError:
                    continue
        return found


def clone(folder: Path) -> Project:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in files.stdout.split():
        if (ROOT / name).is_file():
            (folder / "project" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "project" / name)
    params = yaml.safe_load((folder / "project/params.yaml").read_text())
    for section, values in TINY.items():
        params[section] = {**params.get(section, {}), **values}
    (folder / "project/params.yaml").write_text(yaml.safe_dump(params))
    (folder / "home").mkdir()
    project = Project(folder / "project", folder / "home")
    assert project.run("git", "init", "-q").returncode == 0
    return project


def mark_delivered(folder: Path) -> None:
    """Mark a copied run as delivered to MLflow: the marks contain the original path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(pipeline_run, "deliver_step", lambda *_, **__: None)
        cfg = load_config("params.yaml")
        store = open_store(cfg)
        for name, manifest in finished_steps(cfg, store).items():
            pipeline_run.deliver(cfg, store, steps_of(cfg)[name], manifest)


@pytest.fixture(scope="session")
def make_clone():
    """make_clone(folder) -> a clone, for fixtures of test modules."""
    return clone


@pytest.fixture(scope="session")
def copied(move_artifacts):
    """copied(folder, place) -> a copy of the clone in `folder`."""

    def copy(folder: Path, place: Path) -> Project:
        project = Project(place / "project", place / "home")
        shutil.copytree(folder / "project", project.folder, symlinks=True)
        project.home.mkdir()
        database = project.folder / ".agentgym/mlflow.db"
        if database.exists():
            move_artifacts(database, folder / "project", project.folder)
        return project

    return copy


@pytest.fixture(scope="session")
def made_databases(once, empty_ledger):
    """made_databases(project): add empty databases of Prefect and MLflow if they are missing;
    Prefect and MLflow take nine seconds to create them.
    """

    def build(folder):
        script = (
            "import flows; from pathlib import Path; from services.prefect_server import"
            f" prefect_api; prefect_api(Path({str(folder)!r})).__enter__()"
        )
        home = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=home, timeout=240, check=True)

    def place(project: Project) -> None:
        state = project.folder / ".agentgym"
        state.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(once("prefect", build) / "prefect", state / "prefect")
        if not (state / "mlflow.db").exists():
            shutil.copy(empty_ledger, state / "mlflow.db")

    return place


@pytest.fixture
def fresh(copied, once, tmp_path):
    """Return a clone without a run."""
    return copied(once("clone", clone), tmp_path)


@pytest.fixture
def pulled(copied, once, tmp_path):
    """Return a clone with the dataset, without a run."""

    def build(folder):
        assert clone(folder).run("dvc", "pull").returncode == 0

    return copied(once("pulled", build), tmp_path)


def finished_project(copied, once, place: Path) -> Project:
    """Copy a clone in which the pipeline ran once; `first` is the completed command."""

    def build(folder):
        first = clone(folder).pipeline()
        assert first.returncode == 0, first.stdout + first.stderr
        said = {"stdout": first.stdout, "stderr": first.stderr, "returncode": first.returncode}
        (folder / "first.json").write_text(json.dumps(said))

    original = once("finished", build)
    project = copied(original, place)
    mark_delivered(project.folder)
    project.first = SimpleNamespace(**json.loads((original / "first.json").read_text()))
    return project


@pytest.fixture(scope="session")
def finished(copied, once, tmp_path_factory):
    """Return a finished project. Tests that change it must restore it."""
    return finished_project(copied, once, tmp_path_factory.mktemp("finished"))
