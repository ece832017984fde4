"""Kinds of faults of a run: the command, the victim, the fault, and the operator's repair."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import chaos_servers as servers
import psutil
from chaos_project import GONE_WITHIN_S, Project, Trial
from harness import set_words

from agentgym.store.manifest import decode_commit

FLOW = ("-m", "flows.pipeline")
STAGE = ("-m", "agentgym", "step", "stage-1")
QUICK_POLL_S = 0.01
RAY_GONE_WITHIN_S = 90.0  # agents of a killed cluster try for 60 s to reach it
OURS = ("agentgym", "flows.pipeline")  # commands whose last line names the error
SHORT = ("flow", "environment", "two-learners", "damaged")
KILLED, BROKEN = (-signal.SIGKILL,), (0, 1)
# after a clean shutdown; before Python installed its handlers
INTERRUPTED = (130, -signal.SIGTERM, -signal.SIGINT)
# a collection of all that nobody names, with rules that keep no step
COLLECT = ("-m", "agentgym", "gc", "--remove", "--set", "seed=77", "--set", "store.gc_keep_days=0")
COLLECT += ("--set", "store.gc_keep_runs=0")


@dataclass
class Scene:
    """Project in which a command runs, as passed to a fault."""

    project: Project
    setting: Setting
    process: subprocess.Popen[bytes]
    log: Path
    chance: random.Random
    trial: Trial
    mend: Callable[[], None] = lambda: None  # what an operator does once the command has ended


Victims = Callable[[Project, "subprocess.Popen[bytes]"], list[psutil.Process]]
Strike = Callable[[Scene, list[psutil.Process]], None]


def send(number: signal.Signals) -> Strike:
    """Return a fault that sends a signal to all victims. It counts as a miss if all have ended."""

    def strike(scene: Scene, victims: list[psutil.Process]) -> None:
        num_sent = 0
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)
                num_sent += 1
        scene.trial.hit = num_sent > 0

    return strike


KILL = send(signal.SIGKILL)


@dataclass(frozen=True)
class Setting:
    """Command, its initial state and the servers around it."""

    command: tuple[str, ...]
    prepared: bool = False  # start from a finished preparation; else from an empty state
    # -> overrides
    around: Callable[[Project], AbstractContextManager[tuple[str, ...]]] = lambda _: (
        contextlib.nullcontext(())
    )
    missing: Callable[[], str] = lambda: ""  # reason why it is unavailable here; empty: available
    is_ray: bool = False
    # pattern of the processes around the command, and of those that continue after its end
    stays: str = ""
    gone_within_s: float = GONE_WITHIN_S  # all other processes, after the command's end
    takes_overrides: bool = True  # the command does; else only the checks use them

    def words(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Return the command with its overrides, as a user types it."""
        if not self.takes_overrides:
            return self.command
        if self.command[1] == "agentgym":
            return (*self.command, *set_words(overrides))
        # a deployment takes no --set: it uses the project's own servers
        return (*self.command, *overrides)


@dataclass(frozen=True)
class Kind:
    name: str
    what: str  # for the table
    setting: Setting
    victims: Victims
    strike: Strike = KILL
    codes: tuple[int, ...] = BROKEN  # allowed exit codes of the first command


# --- victims and faults


def matching(pattern: str) -> Victims:
    """Return a rule for victims: all processes of the project whose command line matches."""
    return lambda project, _: project.processes(pattern)


def the_command(_: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the process that was started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(process.pid)] if process.poll() is None else []
    return []


def everything(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the started process and all its descendants, as if the machine were lost."""
    return project.processes() if process.poll() is None else []


def kill_one(scene: Scene, victims: list[psutil.Process]) -> None:
    KILL(scene, [scene.chance.choice(victims)])


def together(first: str, second: str) -> Victims:
    """Return a rule for victims: processes that match either pattern, while both have matches."""

    def victims(project: Project, _: subprocess.Popen[bytes]) -> list[psutil.Process]:
        both = project.processes(first), project.processes(second)
        return [*both[0], *both[1]] if all(both) else []

    return victims


def fill_disk(scene: Scene, _: list[psutil.Process]) -> None:
    """Fill the disk that contains the project's state until the command has ended."""
    filler = scene.project.state / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()

    def mend() -> None:
        filler.unlink()
        log_text = scene.log.read_text(errors="replace", encoding="utf-8")
        if scene.process.returncode and not re.search(r"(?i)no space left|disk is full", log_text):
            wrong = f"the error does not say that the disk is full: {log_text[-300:]!r}"
            scene.trial.fail("command", wrong)

    scene.mend = mend


def collect_beside(scene: Scene, _: list[psutil.Process]) -> None:
    """Collect garbage during the flow; the collection must keep all files that the flow needs."""
    report = json.loads(scene.project.must(*COLLECT, "--json"))
    scene.trial.notes.append(f"{report['collected']} of {report['steps']} steps were collected")


def collect_and_be_killed(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill a garbage collection during the flow; a second one finishes it."""
    collecting = scene.project.start(COLLECT, scene.project.scratch / "gc.log")
    with contextlib.suppress(subprocess.TimeoutExpired):
        collecting.wait(scene.chance.uniform(3.0, 8.0))
    collecting.kill()
    scene.trial.notes.append(f"the collection ended with {collecting.wait()}")
    collect_beside(scene, victims)


def is_writing(process: psutil.Process, folder: str) -> bool:
    """Return True if the process has a temporary file of that step folder open."""
    with contextlib.suppress(psutil.Error):
        return any(f"/{folder}/.tmp-" in file.path for file in process.open_files())
    return False


def writing(folder: str, pattern: str) -> Victims:
    """Return a rule for victims: matching processes that write into that folder of stage 1."""

    def victims(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        if not any(project.state.glob(f"store/steps/stage-1-*/{folder}/.tmp-*")):
            return []
        candidates = project.processes(pattern) if pattern else the_command(project, process)
        return [candidate for candidate in candidates if is_writing(candidate, folder)]

    return victims


def num_commits(project: Project) -> int:
    """Return the number of stage 1's commits in its store."""
    if isinstance(project.server, servers.S3Server):
        return len(project.server.commits())
    return len(list(project.state.glob("store/steps/stage-1-*/manifests/*.json")))


def committed(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return the_command(project, process) if num_commits(project) else []


def kill_after_two(scene: Scene, victims: list[psutil.Process]) -> None:
    while num_commits(scene.project) < 2 and scene.process.poll() is None:
        time.sleep(QUICK_POLL_S)
    KILL(scene, victims)


def chosen_file(scene: Scene, commit: bytes, fate: str) -> str:
    """Choose a file of weights or optimizer from a commit, record its fate and return its digest.
    Return "" (a miss) if the commit ends its step: a finished step is not recomputed.
    """
    newest = decode_commit(commit)[-1]
    if newest.done:
        scene.trial.hit = False
        return ""
    name = scene.chance.choice([blob for blob in newest.blobs if "safetensors" in blob])
    scene.trial.notes.append(f"{name} of commit {newest.seq} was {fate}")
    return newest.blobs[name].digest


def damage_shard(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill the run, then change a byte of a file of its newest commit."""
    kill_after_two(scene, victims)

    def mend() -> None:
        folder = next(scene.project.state.glob("store/steps/stage-1-*"))
        digest = chosen_file(scene, max(folder.glob("manifests/*.json")).read_bytes(), "damaged")
        if digest:
            path = folder / "blobs" / digest
            data = bytearray(path.read_bytes())
            data[scene.chance.randrange(len(data))] ^= 1
            path.write_bytes(data)

    scene.mend = mend


def lose_object(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill the run, then delete a file of its newest commit from the bucket."""
    kill_after_two(scene, victims)

    def mend() -> None:
        server: servers.S3Server = scene.project.server
        name, commit = server.newest()
        if digest := chosen_file(scene, commit, f"lost ({name})"):
            key = name.partition("manifests/")[0] + f"blobs/{digest}"
            server.client.delete_object(Bucket=server.bucket, Key=key)

    scene.mend = mend


def second_learner(scene: Scene, victims: list[psutil.Process]) -> None:
    """Start another process on the stage, which must be refused; then kill the stage's holder."""
    other = scene.project.completed(*scene.process.args)
    holder = (
        rf"step stage-1 .* is held by process {scene.process.pid} on"
        rf" {re.escape(socket.gethostname())}, since \d{{4}}-.*\(epoch \d+\)"
    )
    if scene.process.poll() is not None or "stage-1: done" in other.stdout:
        scene.trial.hit = False  # too late: the stage was no longer taken
        return
    refusal = [line for line in other.stderr.splitlines() if re.search(holder, line)]
    scene.trial.notes += refusal
    if other.returncode != 1 or not refusal:
        wrong = "the second learner was not refused with who holds the stage"
        scene.trial.fail("command", f"{wrong}: {other.returncode}, {other.stderr[-500:]!r}")
    KILL(scene, victims)


def holds_stage(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the started process once it has the stage's lease."""
    return the_command(project, process) if project.phase().startswith("stage-1,") else []


def kill_mlflow(scene: Scene, _: list[psutil.Process]) -> None:
    """Kill the server and restart it some seconds later."""
    server: servers.MlflowServer = scene.project.server
    server.kill()
    away_s = scene.chance.uniform(0, 20)
    time.sleep(away_s)
    server.start()
    scene.trial.notes.append(f"away for {away_s:.0f} s and its start")


def second_node(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of the second node while it has work."""
    node = project.server.second_node() if process.poll() is None else []
    with contextlib.suppress(psutil.NoSuchProcess):
        if any("ray::" in " ".join(child.cmdline()) for child in node[1:]):
            return node
    return []


def lose_node(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill the node and everything on it; another node joins instead."""
    KILL(scene, victims)
    scene.project.server.replace_node()


WHOLE = Setting(FLOW)
STEP = Setting(STAGE, prepared=True)
LEDGER = Setting(FLOW, around=servers.mlflow_server, stays=r"mlflow.*server")
SMALL_DISK = Setting(FLOW, around=servers.small_disk, missing=servers.no_mount)
DEPLOYED = Setting(
    ("-m", "prefect", "--no-prompt", "deployment", "run", "pipeline/local", "--watch"),
    around=servers.services,
    stays=".",
)
ON_RAY = ("--set", "ray.num_workers=2", "--set", "ray.placement_timeout_s=300", "--set")
LOCAL_RAY = Setting(
    (*STAGE, *ON_RAY, "compute=ray"), prepared=True, missing=servers.no_ray, is_ray=True
)
JOINED_RAY = replace(LOCAL_RAY, around=partial(servers.ray_cluster, fact="address"), stays=".")
RAY_JOB = replace(
    JOINED_RAY,
    command=(*STAGE, *ON_RAY, "compute=ray-job"),
    around=partial(servers.ray_cluster, fact="dashboard"),
)
TWO_RANKS = replace(
    LOCAL_RAY,
    command=(*STAGE, "--set", "ray.num_ranks=2", *ON_RAY, "compute=ray"),
    around=servers.slow_disk,
    gone_within_s=RAY_GONE_WITHIN_S,
)
ON_S3 = Setting((*STAGE, "--with-parents"), around=servers.s3_store)
SERVER = matching(r"-m envs serve(?!.*--check)")
PREFECT, MLFLOW = matching(r"-m services\.prefect_server"), matching(r"mlflow.*server")
WORKER, RUN = r"-m services\.supervisor worker", r"-m prefect\.engine"
DRIVER = matching(r"-m agentgym step stage-1 --verbose")
RAY_WORKER, RANK = matching(r"^ray::RolloutWorker"), writing("blobs", r"^ray::LearnerRank")
MANIFEST = writing("manifests", "")
TERMINATE, INTERRUPT = send(signal.SIGTERM), send(signal.SIGINT)


def named(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


KINDS = named(
    Kind("flow", "flow process, SIGKILL", WHOLE, the_command, codes=KILLED),
    Kind("step", "step process, SIGKILL", STEP, the_command, codes=KILLED),
    Kind("environment", "environment server, SIGKILL", WHOLE, SERVER),
    Kind("prefect", "Prefect server, SIGKILL", WHOLE, PREFECT),
    Kind("mlflow", "MLflow server, SIGKILL", LEDGER, MLFLOW, kill_mlflow),
    Kind(
        "machine",
        "flow, environment and Prefect server together, SIGKILL",
        WHOLE,
        everything,
        codes=KILLED,
    ),
    Kind("sigterm", "flow process, SIGTERM", WHOLE, the_command, TERMINATE, INTERRUPTED),
    Kind("sigint", "step process, SIGINT", STEP, the_command, INTERRUPT, INTERRUPTED),
    Kind("disk", "disk full", SMALL_DISK, the_command, fill_disk),
    Kind("run", "run of a deployment, SIGKILL", DEPLOYED, matching(RUN)),
    Kind(
        "worker",
        "Prefect worker and the run it started together, SIGKILL",
        DEPLOYED,
        together(WORKER, RUN),
    ),
    Kind("ray-worker", "Ray worker, SIGKILL", LOCAL_RAY, RAY_WORKER, kill_one),
    Kind("ray-node", "node of a two-node Ray cluster, SIGKILL", JOINED_RAY, second_node, lose_node),
    Kind("ray-driver", "driver of a Ray job, SIGKILL", RAY_JOB, DRIVER),
    Kind(
        "ray-follower",
        "process that follows a Ray job, SIGKILL",
        RAY_JOB,
        the_command,
        codes=KILLED,
    ),
    Kind(
        "gc",
        "`agentgym gc --remove` of all that nobody names, beside the flow",
        WHOLE,
        the_command,
        collect_beside,
        (0,),
    ),
    Kind(
        "gc-killed",
        "`agentgym gc --remove` beside the flow, SIGKILL in the middle, and once more",
        WHOLE,
        the_command,
        collect_and_be_killed,
        (0,),
    ),
    Kind("shard", "rank of two that writes its shard, SIGKILL", TWO_RANKS, RANK, kill_one),
    Kind(
        "manifest",
        "step process between shards and manifest, SIGKILL",
        TWO_RANKS,
        MANIFEST,
        codes=KILLED,
    ),
    Kind(
        "damaged",
        "step process, SIGKILL; then a byte of the newest commit's weights or optimizer",
        STEP,
        committed,
        damage_shard,
        KILLED,
    ),
    Kind(
        "s3-lost",
        "step process on S3, SIGKILL; then a file of the newest commit is gone",
        ON_S3,
        committed,
        lose_object,
        KILLED,
    ),
    Kind(
        "two-learners",
        "two learners on one stage, then SIGKILL of the holder",
        STEP,
        holds_stage,
        second_learner,
        KILLED,
    ),
)
