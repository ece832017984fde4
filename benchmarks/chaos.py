"""Kills parts of a run at random times, from outside, and checks what is left: `python benchmarks/chaos.py`.

In a copy of this repository a tiny run is started; at a random moment one of its parts is killed, the disk is filled, or a
second learner comes; the same command is then given again until it ends. After each fault the run must be audited, no item
lost or trained twice, no point or model version doubled, nothing left running. Writes docs/results/faults.md and faults.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import yaml
from pipeline import machine

ROOT = Path(__file__).parents[1]
OWNER = "AGENTGYM_CHAOS_OWNER"  # in the environment of every process of a project; how they are found
TINY = {
    "model": {"hidden_size": 32, "num_heads": 1, "num_kv_heads": 1, "mlp_size": 64},
    "warm_start": {"num_demos": 40, "steps": 20, "batch_size": 16},
    "rollout": {"items_per_step": 4, "group_size": 4},
    "horizon": {"max_turns": [5, 8], "stage_steps": [3, 3]},
    "validation": {"every": 2, "num_items": 4},
    "evaluation": {"num_items": 8, "num_samples": 1, "k": [1], "num_bootstrap": 200, "chunk_items": 4},
}
FLOW = ("-m", "flows.pipeline")
STAGE = ("-m", "agentgym", "step", "stage-1")
PREPARATION = ("prepare", "initialise", "warm-start")  # what stage-1 stands on

# what the store holds, by the project's own source: keys change with it
LINEAGE = """
import json, sys
from agentgym.config import load_config
from agentgym.steps import finished, open_store
cfg = load_config("params.yaml", sys.argv[1:])
store, done = open_store(cfg), finished(cfg, open_store(cfg))
stages = [final for name, final in done.items() if name.startswith("stage-")]
items = [item for final in stages for commit in store.history(final.step, final.key) for item in commit.state["consumed"]]
print(json.dumps([list(done), items]))
"""

POLL_S = 0.1
GONE_WITHIN_S = 30.0  # after a command ended
COMMAND_TIMEOUT_S = 1200.0
START_TIMEOUT_S = 300.0
MAX_COMMANDS = 5  # until one must have ended well
SHORT = ("flow", "step", "environment", "two-learners")


class Project:
    """A copy of this repository with a small run, the commands typed in it, and what can be seen of them from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.scratch = folder / "project", folder / "home", folder / "tmp"
        self.state = self.folder / ".agentgym"
        self.mlflow: MlflowServer | None = None
        self.ray: RayCluster | None = None
        self.ports: set[int] = set()  # every one a process of ours was seen listening on
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in names.stdout.split():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        params = yaml.safe_load((self.folder / "params.yaml").read_text())
        for section, values in TINY.items():
            params[section] |= values
        (self.folder / "params.yaml").write_text(yaml.safe_dump(params))
        for place in (self.home, self.scratch):
            place.mkdir()
        foreign = ("PREFECT_", "DVC_", "MLFLOW_", "HF_", "MPL", "RAY_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {
            **inherited,
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
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
        """Result: what it said. Errors: RuntimeError where it failed."""
        words = [sys.executable, *command] if command[0].startswith("-") else list(command)
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
        return done.stdout

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a killed group is the command's own
            )

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Everything alive that was started here, however long its chain of parents, whose command line matches.

        Ray's workers write over their environment: they are known by their parents and by where they work.
        """
        running = list(psutil.process_iter(["ppid", "cmdline", "cwd", "status"]))
        ours: set[int] = set()
        for process in sorted(running, key=lambda process: process.pid):
            with contextlib.suppress(psutil.Error):
                place = process.info["cwd"] or ""
                if (
                    process.info["ppid"] in ours
                    or place.startswith(str(self.folder))
                    or process.environ().get(OWNER) == self.environment[OWNER]
                ):
                    ours.add(process.pid)
        found = [p for p in running if p.pid in ours and p.info["status"] != psutil.STATUS_ZOMBIE]
        return [process for process in found if re.search(pattern, " ".join(process.info["cmdline"] or ()))]

    def look_at_ports(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                self.ports |= {c.laddr.port for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}

    def phase(self) -> str:
        """Which step holds its lease, and after which commit it is."""
        leases = sorted(self.state.glob("store/steps/*/leases/*.json"), key=lambda path: path.stat().st_ctime)
        if not leases:
            return "before the first step"
        last = leases[-1]
        step = last.parents[1].name.rpartition("-")[0]
        if last.with_suffix(".released").exists():
            return f"after {step}"
        return f"{step}, {len(list(last.parents[1].glob('manifests/*.json')))} commits made"

    def lineage(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(steps that are done, ids of the items trained on in the order of the committed optimiser steps)."""
        done, items = json.loads(self.must("-c", LINEAGE, *overrides).splitlines()[-1])
        return tuple(done), tuple(items)

    def clear(self) -> None:
        """Forget every run. The place itself stays: it may be a disk of its own."""
        self.ports.clear()
        self.state.mkdir(exist_ok=True)
        for entry in [*self.state.iterdir(), *self.scratch.iterdir()]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def end(self) -> None:
        """Kill whatever is left. For the end of this program, however it comes."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@dataclass
class Trial:
    """One fault and what came of it."""

    kind: str
    number: int
    at_s: float = 0.0  # after the command was started
    phase: str = ""
    hit: bool = False  # a fault without a victim does not count
    codes: list[int] = field(default_factory=list)  # exit codes of the command, one for each time it was given
    recovery_s: float = 0.0  # from the fault to the end of the last command
    failures: dict[str, list[str]] = field(default_factory=dict)  # check -> what is wrong
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(self.failures.values())


@dataclass
class Scene:
    """A project in which a command runs, as a fault sees it."""

    project: Project
    setting: Setting
    process: subprocess.Popen[bytes]
    log: Path
    chance: random.Random
    trial: Trial
    mend: Callable[[], None] = lambda: None  # what an operator does once the command has ended


@dataclass(frozen=True)
class Setting:
    """What is started, on what, and what stands around it."""

    command: tuple[str, ...]
    prepared: bool = False  # begin where the preparation is done; else with nothing
    around: Callable[[Project], AbstractContextManager[tuple[str, ...]]] = lambda _: contextlib.nullcontext(())  # -> overrides
    missing: Callable[[], str] = lambda: ""  # why it cannot be had here; empty: it can
    stays: str = ""  # matches the processes that stand around it, and what goes on by itself when the command has ended

    def words(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The command with its overrides, as a user types it."""
        if self.command[1] == "agentgym":
            return (*self.command, *(word for override in overrides for word in ("--set", override)))
        return (*self.command, *overrides)  # a deployment takes none: its servers are the project's own


@dataclass(frozen=True)
class Kind:
    """One way to do harm."""

    name: str
    what: str  # for the table
    setting: Setting
    victims: Callable[[Project, subprocess.Popen[bytes]], list[psutil.Process]]
    strike: Callable[[Scene, list[psutil.Process]], None]
    codes: tuple[int, ...]  # the first command may end so


# --- what is killed, and how ---------------------------------------------------------------------------------------------


def send(number: signal.Signals) -> Callable[[Scene, list[psutil.Process]], None]:
    """To every victim at once."""

    def strike(_: Scene, victims: list[psutil.Process]) -> None:
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)

    return strike


def matching(pattern: str) -> Callable[[Project, subprocess.Popen[bytes]], list[psutil.Process]]:
    """Every process of the project whose command line has it."""
    return lambda project, _: project.processes(pattern)


def the_command(_: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process that was started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(process.pid)] if process.poll() is None else []
    return []


def everything(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process that was started and all it has started, as when the machine is lost."""
    return project.processes() if process.poll() is None else []


def kill_one(scene: Scene, victims: list[psutil.Process]) -> None:
    """SIGKILL to any one of them."""
    send(signal.SIGKILL)(scene, [scene.chance.choice(victims)])


def together(first: str, second: str) -> Callable[[Project, subprocess.Popen[bytes]], list[psutil.Process]]:
    """The processes that match either, while there are both."""

    def victims(project: Project, _: subprocess.Popen[bytes]) -> list[psutil.Process]:
        both = project.processes(first), project.processes(second)
        return [*both[0], *both[1]] if all(both) else []

    return victims


def fill_disk(scene: Scene, _: list[psutil.Process]) -> None:
    """Not a byte is left where the project keeps its state, until the command has ended."""
    filler = scene.project.state / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()

    def mend() -> None:
        filler.unlink()
        said = scene.log.read_text(errors="replace")
        if scene.process.returncode and not re.search(r"(?i)no space left|disk is full", said):
            scene.trial.failures["command"] = [f"the error does not say that the disk is full: {said[-300:]!r}"]

    scene.mend = mend


def second_learner(scene: Scene, victims: list[psutil.Process]) -> None:
    """Another process on the same stage is refused with who holds it; then the holder is killed, and the stage is free."""
    other = subprocess.run(
        scene.process.args, cwd=scene.project.folder, env=scene.project.environment, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    line = other.stderr.strip().splitlines()[-1:] or [""]
    holder = rf"step stage-1 .* is held by process {scene.process.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-.*\(epoch \d+\)"
    if scene.process.poll() is not None:
        scene.trial.hit = False  # too late to meet it
        return
    scene.trial.notes += line
    if other.returncode != 1 or not re.search(holder, line[0]):
        scene.trial.failures["command"] = [f"the second learner was not refused with who holds the stage: {other.returncode}, {line[0]!r}"]
    send(signal.SIGKILL)(scene, victims)


def holds_stage(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process that was started, once the stage is its own."""
    return the_command(project, process) if project.phase().startswith("stage-1,") else []


# --- what stands around a command ----------------------------------------------------------------------------------------


@dataclass
class MlflowServer:
    """As an operator would run it, brought back on the same port."""

    project: Project
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        database, artifacts = self.project.state / "mlflow.db", self.project.state / "mlflow-artifacts"
        command = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(artifacts)]
        log = self.project.scratch / "mlflow-server.log"
        self.process = self.project.start([*command, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"], log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(f"http://127.0.0.1:{self.port}/health"):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the MLflow server does not come up\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def mlflow_server(project: Project) -> Iterator[tuple[str, ...]]:
    server = MlflowServer(project, free_port())
    server.start()
    project.mlflow = server
    try:
        yield (f"tracking.uri=http://127.0.0.1:{server.port}",)
    finally:
        server.kill()


def kill_mlflow(scene: Scene, _: list[psutil.Process]) -> None:
    """The server is away for some seconds."""
    server = scene.project.mlflow
    assert server is not None
    server.kill()
    away_s = scene.chance.uniform(0, 20)
    time.sleep(away_s)
    server.start()
    scene.trial.notes.append(f"away for {away_s:.0f} s and its start")


@contextlib.contextmanager
def small_disk(project: Project) -> Iterator[tuple[str, ...]]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(project.state)], check=True)
    try:
        yield ()
    finally:
        for process in project.processes():  # nothing may hold the disk
            process.kill()
        subprocess.run(["umount", "--lazy", str(project.state)], check=True)


@contextlib.contextmanager
def services(project: Project) -> Iterator[tuple[str, ...]]:
    """`make up`: a Prefect server, a worker and MLflow under a supervisor."""
    project.must("-m", "tasks.services", "up")
    try:
        yield ()
    finally:
        project.must("-m", "tasks.services", "down")


RAY_CLUSTER = """
import json, os, sys
from ray.cluster_utils import Cluster
address = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": 0, "object_store_memory": 150_000_000, "temp_dir": sys.argv[1]}
cluster = Cluster(initialize_head=True, head_node_args=address)
def add():
    return cluster.add_node(num_cpus=2, object_store_memory=150_000_000).all_processes["raylet"][0].process.pid
def tell(pid):
    with open(sys.argv[2] + ".new", "w") as file:
        json.dump({"address": cluster.address, "dashboard": "http://" + cluster.webui_url, "raylet": pid}, file)
    os.rename(sys.argv[2] + ".new", sys.argv[2])
tell(add())
for line in sys.stdin:
    tell(add())
cluster.shutdown()
"""


@dataclass
class RayCluster:
    """Two nodes on this machine, as an operator would run them: a lost one is replaced."""

    project: Project
    folder: Path
    process: subprocess.Popen[bytes]

    def facts(self) -> dict[str, Any]:
        """Address, dashboard, and the process of the second node."""
        place, deadline = self.folder / "facts.json", time.monotonic() + START_TIMEOUT_S
        while not place.exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the Ray cluster does not come up\n{(self.project.scratch / 'ray.log').read_text()[-2000:]}")
            time.sleep(POLL_S)
        facts: dict[str, Any] = json.loads(place.read_text())
        return facts

    def second_node(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            raylet = psutil.Process(self.facts()["raylet"])
            return [raylet, *raylet.children(recursive=True)]
        return []

    def replace_node(self) -> None:
        (self.folder / "facts.json").unlink()
        assert self.process.stdin is not None
        self.process.stdin.write(b"add\n")
        self.process.stdin.flush()
        self.facts()


@contextlib.contextmanager
def ray_cluster(project: Project, fact: str) -> Iterator[tuple[str, ...]]:
    """Overrides: the address of a cluster of two nodes of two CPUs each; `fact` says which."""
    folder = Path(tempfile.mkdtemp(prefix="agc-", dir="/tmp"))  # a socket's path has 107 bytes
    project.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    with (project.scratch / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RAY_CLUSTER, str(folder), str(folder / "facts.json")],
            cwd=project.folder, env=project.environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    project.ray = RayCluster(project, folder, process)
    try:
        yield (f"ray.address={project.ray.facts()[fact]}",)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
            del project.environment[name]


def gcs(project: Project) -> AbstractContextManager[tuple[str, ...]]:
    return ray_cluster(project, "address")


def dashboard(project: Project) -> AbstractContextManager[tuple[str, ...]]:
    return ray_cluster(project, "dashboard")


def second_node(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The second node, while it has work."""
    found = project.ray.second_node() if project.ray is not None and process.poll() is None else []
    with contextlib.suppress(psutil.NoSuchProcess):
        return found if any("ray::" in " ".join(each.cmdline()) for each in found[1:]) else []
    return []


def lose_node(scene: Scene, victims: list[psutil.Process]) -> None:
    """The node and everything on it; another joins in its place."""
    send(signal.SIGKILL)(scene, victims)
    assert scene.project.ray is not None
    scene.project.ray.replace_node()


def no_ray() -> str:
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return "" if (ROOT / "agentgym/training/cluster.py").is_file() else "this version has no compute on Ray"


def no_services() -> str:
    return "" if (ROOT / "tasks/services.py").is_file() else "this version has no deployments"


def no_mount() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "this system has no mount"
        if done.returncode:
            return f"a disk of its own cannot be mounted here ({done.stderr.strip()}); run as root"
        subprocess.run(["umount", folder], check=True)
    return ""


def answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WHOLE = Setting(FLOW)
STEP = Setting(STAGE, prepared=True)
LEDGER = Setting(FLOW, around=mlflow_server, stays=r"mlflow.*server")
DEPLOYED = Setting(
    ("-m", "prefect", "--no-prompt", "deployment", "run", "pipeline/local", "--watch"), around=services, missing=no_services, stays="."
)
ON_RAY = ("--set", "ray.num_workers=2", "--set", "ray.placement_timeout_s=300", "--set")
LOCAL_RAY = Setting((*STAGE, *ON_RAY, "compute=ray"), prepared=True, missing=no_ray)
JOINED_RAY = Setting((*STAGE, *ON_RAY, "compute=ray"), prepared=True, around=gcs, missing=no_ray, stays=".")
RAY_JOB = Setting((*STAGE, *ON_RAY, "compute=ray-job"), prepared=True, around=dashboard, missing=no_ray, stays=".")
WORKER, RUN = r"-m tasks\.\w+ worker", r"-m prefect\.engine"
KILLED, BROKEN = (-signal.SIGKILL,), (0, 1)
INTERRUPTED = (130, 0, -signal.SIGTERM, -signal.SIGINT)  # in order; too late; before Python had its handlers
KINDS = {
    kind.name: kind
    for kind in (
        Kind("flow", "flow process, SIGKILL", WHOLE, the_command, send(signal.SIGKILL), KILLED),
        Kind("step", "step process, SIGKILL", STEP, the_command, send(signal.SIGKILL), KILLED),
        Kind("environment", "environment server, SIGKILL", WHOLE, matching(r"-m envs serve(?!.*--check)"), send(signal.SIGKILL), BROKEN),
        Kind("prefect", "Prefect server, SIGKILL", WHOLE, matching(r"-m tasks\.prefect_server"), send(signal.SIGKILL), BROKEN),
        Kind("mlflow", "MLflow server, SIGKILL", LEDGER, matching(r"mlflow.*server"), kill_mlflow, BROKEN),
        Kind("machine", "flow, environment and Prefect server together, SIGKILL", WHOLE, everything, send(signal.SIGKILL), KILLED),
        Kind("sigterm", "flow process, SIGTERM", WHOLE, the_command, send(signal.SIGTERM), INTERRUPTED),
        Kind("sigint", "step process, SIGINT", STEP, the_command, send(signal.SIGINT), INTERRUPTED),
        Kind("disk", "disk full", Setting(FLOW, around=small_disk, missing=no_mount), the_command, fill_disk, BROKEN),
        Kind("run", "run of a deployment, SIGKILL", DEPLOYED, matching(RUN), send(signal.SIGKILL), BROKEN),
        Kind(
            "worker",
            "Prefect worker and the run it started together, SIGKILL",
            DEPLOYED,
            together(WORKER, RUN),
            send(signal.SIGKILL),
            BROKEN,
        ),
        Kind("ray-worker", "Ray worker, SIGKILL", LOCAL_RAY, matching(r"^ray::RolloutWorker"), kill_one, BROKEN),
        Kind("ray-node", "node of a two-node Ray cluster, SIGKILL", JOINED_RAY, second_node, lose_node, BROKEN),
        Kind(
            "ray-driver",
            "driver of a Ray job, SIGKILL",
            RAY_JOB,
            matching(r"-m agentgym step stage-1 --verbose"),
            send(signal.SIGKILL),
            BROKEN,
        ),
        Kind("ray-follower", "process that follows a Ray job, SIGKILL", RAY_JOB, the_command, send(signal.SIGKILL), KILLED),
        Kind("two-learners", "two learners on one stage, then SIGKILL of the holder", STEP, holds_stage, second_learner, KILLED),
    )
}


# --- one trial -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The same command when nobody disturbs it."""

    wall_s: float
    spans: dict[str, tuple[float, float]]  # kind -> seconds between which its victim is there
    steps: tuple[str, ...]  # done in the end
    consumed: tuple[str, ...]  # items, in the order of the committed optimiser steps
    versions: int  # registered models


@dataclass(frozen=True)
class Prepared:
    """State to begin with: nothing, or a copy of a preparation that went well."""

    project: Project
    copy: Path

    def make(self) -> None:
        self.project.clear()
        for name in PREPARATION:
            self.project.must("-m", "agentgym", "step", name)
        shutil.copytree(self.project.state, self.copy)

    def set_up(self, setting: Setting) -> None:
        self.project.clear()
        if setting.prepared:
            shutil.copytree(self.copy, self.project.state, dirs_exist_ok=True)


def observe(project: Project, prepared: Prepared, setting: Setting, kinds: Sequence[Kind]) -> Reference:
    """Run the setting's command undisturbed; see when each victim is alive."""
    prepared.set_up(setting)
    with setting.around(project) as overrides:
        log = project.scratch / "reference.log"
        began = time.monotonic()
        process = project.start(setting.words(overrides), log)
        seen: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        while process.poll() is None:
            for kind in kinds:
                if kind.victims(project, process):
                    seen[kind.name].append(time.monotonic() - began)
            if time.monotonic() - began > COMMAND_TIMEOUT_S:
                raise RuntimeError(f"the undisturbed run does not end\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        wall_s = time.monotonic() - began
        if process.returncode:
            raise RuntimeError(f"the undisturbed run ended with {process.returncode}\n{log.read_text()[-2000:]}")
        spans = {name: (times[0], times[-1]) for name, times in seen.items() if times}
        return Reference(wall_s, spans, *project.lineage(overrides), num_versions(project))


def attempt(project: Project, prepared: Prepared, kind: Kind, reference: Reference, seed: int, number: int) -> Trial:
    """Start the command, do the harm at a random time while its victim is there, give the command until it ends, check."""
    trial = Trial(kind.name, number)
    chance = random.Random(f"{seed} {kind.name} {number}")  # noqa: S311 - no secret
    prepared.set_up(kind.setting)
    with kind.setting.around(project) as overrides:
        words = kind.setting.words(overrides)
        log = project.scratch / f"{kind.name}-{number}.log"
        process = project.start(words, log)
        began = time.monotonic()
        scene = Scene(project, kind.setting, process, log, chance, trial)
        moment = began + chance.uniform(*reference.spans[kind.name])
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(min(POLL_S, max(0.0, moment - time.monotonic())))
        while not (victims := kind.victims(project, process)) and process.poll() is None:
            time.sleep(POLL_S)  # this run is slower than the one observed
        project.look_at_ports()
        trial.at_s, trial.phase, trial.hit = time.monotonic() - began, project.phase(), bool(victims) and process.poll() is None
        if trial.hit:
            kind.strike(scene, victims)
        struck = time.monotonic()
        trial.codes.append(ended(process, log, trial))
        scene.mend()
        if trial.hit and trial.codes[0] not in kind.codes:
            trial.failures.setdefault("command", []).append(f"it ended with {trial.codes[0]}, expected {kind.codes}: {last_line(log)}")
        check_gone(project, trial, keep=kind.setting.stays)
        while trial.codes[-1] != 0 and len(trial.codes) < MAX_COMMANDS:
            again = log.with_suffix(f".{len(trial.codes)}.log")
            process = project.start(words, again)
            trial.codes.append(ended(process, again, trial))
            if trial.codes[-1]:
                trial.notes.append(f"{trial.codes[-1]}: {last_line(again)}")
        trial.recovery_s = time.monotonic() - struck
        trial.failures["ended"] = [] if trial.codes[-1] == 0 else [f"not after {len(trial.codes)} commands: {trial.codes}; {trial.notes}"]
        check_gone(project, trial, keep=kind.setting.stays)
        check_result(project, overrides, reference, trial)
    check_gone(project, trial, keep="")
    return trial


def ended(process: subprocess.Popen[bytes], log: Path, trial: Trial) -> int:
    """Its exit code; a command that does not end is itself a failure, and is killed."""
    try:
        return process.wait(COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        trial.failures.setdefault("command", []).append(f"it did not end within {COMMAND_TIMEOUT_S:g} s: {last_line(log)}")
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:300]


# --- what must be true afterwards ----------------------------------------------------------------------------------------

CHECKS = ("command", "ended", "audit", "steps", "items", "points", "models", "processes", "ports", "files")


def check_gone(project: Project, trial: Trial, keep: str) -> None:
    """No process of the project, and nobody on a port it had; `keep` matches what stays."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        staying = {process.pid for process in project.processes(keep)} if keep else set()
        left = [process for process in project.processes() if process.pid not in staying]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    commands = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline())[:200])
    trial.failures.setdefault("processes", []).extend(commands)
    open_ports = set() if keep else {port for port in project.ports if is_open(port)}
    trial.failures.setdefault("ports", []).extend(f"port {port} still answers" for port in sorted(open_ports))


def is_open(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def check_result(project: Project, overrides: Sequence[str], reference: Reference, trial: Trial) -> None:
    """What the run says of itself, and what its store and its ledger hold, read without its help."""
    settings = [word for override in overrides for word in ("--set", override)]
    words = [sys.executable, "-m", "agentgym", "audit", "--json", "--episodes", "4", *settings]
    audit = subprocess.run(
        words, cwd=project.folder, env=project.environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    trial.failures["audit"] = audit_failures(audit)
    done, items = project.lineage(overrides)
    trial.failures["steps"] = [] if done == reference.steps else [f"done are {done}, undisturbed {reference.steps}"]
    trial.failures["items"] = [] if items == reference.consumed else [f"trained on {items}, undisturbed {reference.consumed}"]
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
    bad = [f"{check['name']}: {(check['failures'] or ['failed'])[0]}" for check in report["checks"] if not check["ok"]]
    return bad or ([] if audit.returncode == 0 else [f"audit ended with {audit.returncode}"])


def repeated_points(database: Path) -> list[str]:
    """(metric, step) that one MLflow run holds more than once."""
    query = "select run_uuid, key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1"
    return [f"{key} at step {step} of run {run}: {count} points" for run, key, step, count in rows(database, query)]


def repeated_models(database: Path) -> list[str]:
    """Checkpoints registered more than once under one name."""
    query = "select name, value, count(*) from model_version_tags where key = 'step_key' group by name, value having count(*) > 1"
    return [f"checkpoint {value[:12]} is {count} versions of {name}" for name, value, count in rows(database, query)]


def num_versions(project: Project) -> int:
    found = rows(project.state / "mlflow.db", "select count(*) from model_versions")
    return int(found[0][0]) if found else 0


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    if not database.is_file():
        return []
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query).fetchall()


def leftovers(state: Path) -> list[str]:
    """Temporary names in the state directory, but for what the next commit of that step removes (blobs, leases, manifests)."""
    found = [path for path in state.rglob(".tmp-*") if path.parent.name not in ("blobs", "leases", "manifests")]
    found += [path for path in (state / "logs").glob("*") if path.suffix not in (".log", ".lock")]
    return [str(path.relative_to(state)) for path in found]


# --- the report ----------------------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any]) -> str:
    """The table people read, from what faults.json holds."""
    trials = [Trial(**trial) for trial in result["trials"]]
    hits = [trial for trial in trials if trial.hit]
    struck = sorted({trial.kind for trial in hits})
    lines = [
        "# Faults",
        "",
        f"{len(hits)} faults of {len(struck)} kinds; {sum(trial.ok for trial in hits)} of them left a run that passes every check below. "
        f"Made by `{result['command']}` on {result['machine']['cores']} cores of {', '.join(result['machine']['cpu'])} "
        f"({result['wall_s'] / 60:.0f} minutes); every trial is in `faults.json`.",
        "",
        "Each fault comes from outside, at a random time at which its victim is alive in an undisturbed run. Then the same command is",
        "given again until it ends.",
        "",
        "| fault | hits | where | commands until done, most | recovery s, longest | passed |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in result["kinds"].items():
        own = [trial for trial in hits if trial.kind == name]
        if name in result["not_run"]:
            lines.append(f"| {what} | not run: {result['not_run'][name]} | | | | |")
        elif own:
            places = Counter(trial.phase.partition(",")[0] for trial in own)
            where = ", ".join(f"{place} {count}" if count > 1 else place for place, count in places.items())
            most, longest = max(len(trial.codes) for trial in own), max(trial.recovery_s for trial in own)
            lines.append(f"| {what} | {len(own)} | {where} | {most} | {longest:.0f} | {sum(trial.ok for trial in own)} of {len(own)} |")
        else:
            lines.append(f"| {what} | 0 | | | | |")
    lines += [
        "",
        "Checked after each: the command ended as it says (exit code, error line); in the end exit code 0; `agentgym audit` passes;",
        "every step is done; the items trained on, in order, are those of an undisturbed run; each (metric, step) once per MLflow run;",
        f"one model version per checkpoint; no process left {GONE_WITHIN_S:g} s later; no port answers; no temporary file left over.",
    ]
    refusals = [note for trial in hits if trial.kind == "two-learners" for note in trial.notes[:1]]
    if refusals:
        lines += ["", "The second learner on a stage is refused:", "", f"    {refusals[0]}"]
    failed = [trial for trial in trials if not trial.ok]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [
            f"- {trial.kind} {trial.number}, {trial.phase}: {check}: {failure}"
            for trial in failed
            for check, failures in trial.failures.items()
            for failure in failures[:3]
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="default: all")
    parser.add_argument("--kills", type=int, default=33, help="faults that hit, over all kinds (default 33)")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--short", action="store_true", help=f"one fault each of {', '.join(SHORT)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/faults.md", help="report; the figures lie beside it as .json")
    arguments = parser.parse_args()
    names = arguments.kinds or (list(SHORT) if arguments.short else list(KINDS))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = run([KINDS[name] for name in names], len(names) if arguments.short else arguments.kills, arguments.seed, arguments.out)
    print(to_markdown(result))
    hits = sum(trial["hit"] for trial in result["trials"])
    return 0 if hits and all(Trial(**trial).ok for trial in result["trials"]) else 1


def run(kinds: Sequence[Kind], kills: int, seed: int, out: Path) -> dict[str, Any]:
    """All trials; the report is written after each, so that an interrupted run has one."""
    began = time.monotonic()
    not_run = {kind.name: reason for kind in kinds if (reason := kind.setting.missing())}
    kinds = [kind for kind in kinds if kind.name not in not_run]
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "seed": seed,
        "kinds": {name: kind.what for name, kind in KINDS.items() if kind in kinds or name in not_run},
        "not_run": not_run,
        "references": {},
        "trials": [],
    }
    with tempfile.TemporaryDirectory(prefix="agentgym-chaos-") as folder:
        project = Project(Path(folder))
        prepared = Prepared(project, Path(folder) / "prepared")
        try:
            if any(kind.setting.prepared for kind in kinds):
                prepared.make()
            references: dict[Setting, Reference] = {}
            for number in range(2 * ceil(kills / max(1, len(kinds)))):
                for kind in kinds:
                    hits = Counter(trial["kind"] for trial in result["trials"] if trial["hit"])
                    if hits[kind.name] >= ceil(kills / len(kinds)):
                        continue
                    if kind.setting not in references:
                        same = [other for other in kinds if other.setting == kind.setting]
                        references[kind.setting] = observe(project, prepared, kind.setting, same)
                        result["references"][" ".join(kind.setting.command)] = asdict(references[kind.setting])
                    trial = attempt(project, prepared, kind, references[kind.setting], seed, number)
                    print(f"{time.monotonic() - began:6.0f} s  {kind.what}: {'ok' if trial.ok else 'FAILED'} {asdict(trial)}", flush=True)
                    result["trials"].append(asdict(trial))
                    result["wall_s"] = time.monotonic() - began
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
                    out.write_text(to_markdown(result))
        finally:
            project.end()
    return result


if __name__ == "__main__":
    sys.exit(main())
