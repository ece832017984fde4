"""A copy of this repository with a run small enough to be repeated: its state as seen from outside,
and the checks that its result must pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from harness import POLL_S, ROOT, completed, git, output_of, processes_at, set_words

# variable in the environment of every process of a project, by which they are found
OWNER = "AGENTGYM_CHAOS_OWNER"
LEVELS = {"levels": ["GoToRedBallNoDists"]}
TINY = {  # every optimizer step has a learning signal
    "env": {"options": {**LEVELS, "view": "compact", "actions": "low", "reward": "binary"}},
    "model": {"hidden_size": 32, "num_heads": 1, "num_kv_heads": 1, "mlp_size": 64},
    "warm_start": {"num_demos": 60, "steps": 100, "batch_size": 16, "optimizer": {"lr": 0.005}},
    "rollout": {"items_per_step": 4, "group_size": 4, "temperature": 0.7},
    "optimizer": {"warmup_steps": 1},
    "horizon": {"max_turns": [5, 8], "stage_steps": [8, 3]},
    "validation": {"every": 2, "num_items": 4},
    "evaluation": {"num_items": 8, "num_samples": 1, "k": [1], "chunk_items": 4},
}
PREPARATION = "warm-start"  # the step before stage-1; it includes all earlier steps

# read the store with the project's own source, because step keys depend on it
LINEAGE = """
import json, sys
from agentgym.config import load_config
from agentgym.pipeline.run import finished, open_store
cfg = load_config("params.yaml", sys.argv[1:])
store, done = open_store(cfg), finished(cfg, open_store(cfg))
stages = [final for name, final in done.items() if name.startswith("stage-")]
items = [item for final in stages for commit in store.history(final.step, final.key) for item in \
commit.state["consumed"]]
print(json.dumps([list(done), items]))
"""

GONE_WITHIN_S = 30.0  # after a command ended
COMMAND_TIMEOUT_S = 600.0  # a run that lost its worker while starting is detected after 300 s
START_TIMEOUT_S = 300.0
MAX_TAIL = 20  # lines of a server's log below an error


class Project:
    """A copy of this repository with a small run: its commands, and its state from outside."""

    def __init__(self, folder: Path, sections: Mapping[str, Mapping[str, Any]] = TINY) -> None:
        """Copy the repository and prepare its data. sections: changes to those of params.yaml."""
        self.folder, self.home, self.scratch = folder / "project", folder / "home", folder / "tmp"
        self.state = self.folder / ".agentgym"
        self.server: Any = None  # the server around the command, for the faults
        self.ports: set[int] = set()  # all ports on which a process of the project listened
        self.closed = False
        # not the project's; to inspect each at every poll would take much of a core
        self.others = set(psutil.process_iter())
        for name in git("ls-files").split():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        params = yaml.safe_load((self.folder / "params.yaml").read_text(encoding="utf-8"))
        for section, values in sections.items():
            params[section] = {**params.get(section, {}), **values}
        (self.folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
        self.home.mkdir()
        self.scratch.mkdir()
        # the last: processes start often here, and need their bytecode cache
        foreign = ("PREFECT_", "DVC_", "MLFLOW_", "HF_", "MPL", "RAY_", "PYTHONDONTWRITEBYTECODE")
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith(foreign)},
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "TMPDIR": str(self.scratch),
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            OWNER: secrets.token_hex(8),
        }
        self.must("git", "init", "-q")
        self.must("-m", "dvc", "pull")

    def must(self, *command: str) -> str:
        """Run a command; return its output. Errors: RuntimeError if it fails."""
        self.check_open()
        places = {"cwd": self.folder, "env": self.environment}
        return output_of(command, **places, timeout_s=COMMAND_TIMEOUT_S)

    def completed(
        self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return completed(command, cwd=self.folder, env=self.environment, timeout_s=timeout_s)

    @contextlib.contextmanager
    def knows(self, server: Any, variables: Mapping[str, str]) -> Iterator[None]:
        """Register a server for the faults, and set the variables of the project's commands."""
        self.server = server
        self.environment |= variables
        try:
            yield
        finally:
            self.server = None
            for name in variables:
                del self.environment[name]

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("interrupted")

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        self.check_open()
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the fault kills the command's process group only
            )

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Return all live processes started here, at any depth, whose command line matches."""
        ours: dict[int, psutil.Process] = {}
        new = set(psutil.process_iter()) - self.others
        for process in sorted(new, key=lambda process: process.pid):
            with contextlib.suppress(psutil.Error):
                if process.ppid() in ours or self.is_ours(process):
                    ours[process.pid] = process
        matches = []
        for process in ours.values():
            with contextlib.suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and re.search(pattern, " ".join(process.cmdline())):
                    matches.append(process)
        return matches

    def is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            if process.environ().get(OWNER) == self.environment[OWNER]:
                return True
        with contextlib.suppress(psutil.Error):  # Ray's workers overwrite their environment
            return Path(process.cwd()).is_relative_to(self.folder)
        return False

    def look_at_ports(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                self.ports |= {
                    c.laddr.port
                    for c in process.net_connections(kind="tcp")
                    if c.status == psutil.CONN_LISTEN
                }

    def phase(self) -> str:
        """Return the step that has its lease, and the number of its commits."""
        # copies keep the modification time
        leases = self.state.glob("store/steps/*/leases/*.json")
        last = max(leases, key=lambda path: path.stat().st_mtime, default=None)
        if last is None:
            return "before the first step"
        step = last.parents[1].name.rpartition("-")[0]
        if last.with_suffix(".released").exists():
            return f"after {step}"
        return f"{step}, {len(list(last.parents[1].glob('manifests/*.json')))} commits made"

    def lineage(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (finished steps, ids of the items trained on in the order of their commits)."""
        steps, items = json.loads(self.must("-c", LINEAGE, *overrides).splitlines()[-1])
        return tuple(steps), tuple(items)

    def clear(self) -> None:
        """Delete all runs. The state folder itself stays: it may be a mount point."""
        self.ports.clear()
        self.state.mkdir(exist_ok=True)
        for entry in [*self.state.iterdir(), *self.scratch.iterdir()]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def end(self) -> None:
        """Kill all remaining processes, and those that they may have just started."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the project at the end of this program: no further process starts in it."""
        self.closed = True
        self.end()

    def answers(self, port: int) -> bool:
        """Return True if a process of the project, or an unknown one, listens on the port.
        A neighbor project may have been given a port that was ours.
        """
        for process in processes_at(port)[:1] if is_open(port) else []:
            with contextlib.suppress(psutil.Error):
                return process.environ().get(OWNER) in (None, self.environment[OWNER])
        return is_open(port)


@dataclass
class Trial:
    """One fault and its result."""

    kind: str
    number: int
    at_s: float = 0.0  # after the command was started
    phase: str = ""
    hit: bool = False  # a fault without a victim does not count
    # exit codes of the command, one for each time it was run
    codes: list[int] = field(default_factory=list)
    recovery_s: float = 0.0  # from the fault to the end of the last command
    failures: dict[str, list[str]] = field(default_factory=dict)  # check -> what is wrong
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(self.failures.values())

    def fail(self, check: str, *failures: str) -> None:
        """Record the failures of a check, perhaps none."""
        self.failures.setdefault(check, []).extend(failures)


@dataclass(frozen=True)
class Reference:
    """The same command without a fault."""

    wall_s: float
    alive_s: dict[str, float]  # kind -> seconds from the first to the last sight of its victim
    steps: tuple[str, ...]  # done in the end
    consumed: tuple[str, ...]  # items, in the order of the committed optimizer steps
    versions: int  # registered models

    def faster(self, wall_s: float) -> Reference:
        """Scale the times to a run of at most `wall_s`: the machine was busier when observed."""
        scale = min(1.0, wall_s / self.wall_s)
        alive_s = {name: seconds * scale for name, seconds in self.alive_s.items()}
        return replace(self, wall_s=self.wall_s * scale, alive_s=alive_s)


def check_gone(project: Project, trial: Trial, keep: str, within_s: float = GONE_WITHIN_S) -> None:
    """Record the project's remaining processes and open ports. keep: matches allowed ones."""
    deadline = time.monotonic() + within_s
    while True:
        staying = {process.pid for process in project.processes(keep)} if keep else set()
        left = [process for process in project.processes() if process.pid not in staying]
        # an ending process has no command line any more, but still has its port
        open_ports = set() if keep else {port for port in project.ports if project.answers(port)}
        if not (left or open_ports) or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    commands = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline())[:200])
    trial.fail("processes", *commands)
    trial.fail("ports", *(f"port {port} still answers" for port in sorted(open_ports)))


def is_open(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def check_result(
    project: Project, overrides: Sequence[str], reference: Reference, trial: Trial
) -> None:
    """Check the run with its audit, and its store and MLflow database directly."""
    audit = ("-m", "agentgym", "audit", "--json", "--episodes", "4", *set_words(overrides))
    trial.failures["audit"] = audit_failures(project.completed(*audit))
    steps, items = project.lineage(overrides)
    trial.failures |= {"steps": [], "items": []}
    if steps != reference.steps:
        trial.fail("steps", f"done are {steps}, undisturbed {reference.steps}")
    if items != reference.consumed:
        trial.fail("items", f"trained on {items}, undisturbed {reference.consumed}")
    trial.failures["points"] = repeated_points(project.state / "mlflow.db")
    repeated = repeated_models(project.state / "mlflow.db")
    if num_versions(project) != reference.versions:
        repeated.append(f"{num_versions(project)} model versions, undisturbed {reference.versions}")
    trial.failures["models"] = repeated
    trial.failures["files"] = leftovers(project.state)


def audit_failures(audit: subprocess.CompletedProcess[str]) -> list[str]:
    try:
        report = json.loads(audit.stdout)
    except ValueError:
        return [f"audit ended with {audit.returncode}: {audit.stderr[-500:]}"]
    bad = [
        f"{check['name']}: {(check['failures'] or ['failed'])[0]}"
        for check in report["checks"]
        if not check["ok"]
    ]
    return bad or ([] if audit.returncode == 0 else [f"audit ended with {audit.returncode}"])


def repeated_points(database: Path) -> list[str]:
    """Return descriptions of (metric, step) pairs that one MLflow run contains more than once."""
    columns = "run_uuid, key, step"
    query = f"select {columns}, count(*) from metrics group by {columns}"  # noqa: S608
    found = rows(database, f"{query} having count(*) > 1")
    return [f"{key} at step {step} of run {run}: {num} points" for run, key, step, num in found]


def repeated_models(database: Path) -> list[str]:
    query = "select name, value, count(*) from model_version_tags where key = 'step_key'"
    found = rows(database, f"{query} group by name, value having count(*) > 1")
    return [f"checkpoint {value[:12]} is {num} versions of {name}" for name, value, num in found]


def num_versions(project: Project) -> int:
    counts = rows(project.state / "mlflow.db", "select count(*) from model_versions")
    return int(counts[0][0]) if counts else 0


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    if not database.is_file():
        return []
    connecting = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=30)
    with contextlib.closing(connecting) as connection:
        return connection.execute(query).fetchall()


def leftovers(state: Path) -> list[str]:
    """Return temporary files in the state, except those that the step's next commit removes."""
    swept = ("blobs", "leases", "manifests")
    paths = [path for path in state.rglob(".tmp-*") if path.parent.name not in swept]
    paths += [path for path in (state / "logs").glob("*") if path.suffix not in (".log", ".lock")]
    return [str(path.relative_to(state)) for path in paths]


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines() or [""]
    return lines[-1][:300]


def failure(log: Path) -> str:
    """Return the line near the log's end that names the error, or ""."""
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines()[-MAX_TAIL:]
    return next((line[:300] for line in reversed(lines) if line.startswith("failed: ")), "")
