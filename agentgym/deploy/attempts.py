"""One attempt at a step, run as a job elsewhere: its name, its configuration there, the state that
its cluster reports, and the protocol of a job transport.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from agentgym.config import RunConfig, is_elsewhere
from agentgym.store.keys import object_name

POLL_S = 1.0
STOP_TIMEOUT_S = 60.0
STATE = Path(".agentgym")  # state folder of a job on a machine without our paths
STOP_GRACE_S = 20  # whole seconds a job has to end cleanly
VARIABLES = {  # of a job's processes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S),
    "OMP_NUM_THREADS": "1",
}


class RayUnreachable(RuntimeError):
    """The Ray cluster, or the API server that stores RayJobs, does not answer or refuses us."""


class RayJobFailed(RuntimeError):
    """The job was refused, or ended without the step's result."""


class Phase(enum.Enum):
    """Phase of a job. Each but ENDED has a deadline of its own."""

    QUEUED = "queued"  # held back by a queue of the cluster
    WAITING = "waiting"  # for resources, and for its process to start
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Look:
    """State of a job as its cluster reports it."""

    phase: Phase
    status: str  # the cluster's own word
    message: str = ""
    exit_code: int | None = None
    is_stopped: bool = False  # stopped from outside, before its own end
    is_late: bool = False  # the cluster ended it at its deadline
    is_lost: bool = False  # its cluster is gone; the caller must stop the job


@dataclass(frozen=True, slots=True)
class Job:
    """A step to run: `key` is the step's, as the submitter computed it; `run_key` is the run's."""

    step: str
    run_key: str
    key: str
    cfg: RunConfig

    def name(self, attempt: int) -> str:
        return object_name(self.run_key, self.step, attempt)


class Transport(Protocol):
    """Protocol of a way to run jobs. Methods may raise OSError or RuntimeError: no answer came."""

    place: str  # shown in messages
    gone_means: str  # why a job that existed may be unknown now, for a message

    def attempts(self, job: Job) -> Mapping[int, Look]:
        """Return attempt number -> state, for the attempts at the job that the cluster knows."""

    def submit(self, job: Job, name: str) -> None:
        """Start the job as `name`, unless that exists. Errors: RayJobFailed, ConfigError."""

    def look(self, name: str) -> Look | None:
        """Return the job's state; None if the cluster has no such job, or has forgotten it."""

    async def tail(self, name: str, hear: Callable[[str], None]) -> None:
        """Pass each line of the log to `hear` once, until cancelled. The caller retries errors."""

    def stop(self, name: str) -> None:
        """Stop the job; it may end only after this returns."""

    def settle(self, job: Job) -> None:
        """Clean up after the step is done, when its attempts are no longer needed."""


def numbered(names: Mapping[str, Look], job: Job) -> dict[int, Look]:
    """Return the entries of `names` that are attempts at this job, by attempt number."""
    base = job.name(1)[:-1]
    return {
        int(name.removeprefix(base)): look
        for name, look in names.items()
        if re.fullmatch(rf"{base}[0-9]+", name)
    }


def sent_config(cfg: RunConfig) -> RunConfig:
    """Return the configuration for the step inside a job: it computes in actors of the cluster that
    runs the job or, with `deterministic`, in the job's own process.

    Paths of data and store are absolute or, if the job's machine does not have this machine's
    paths, below STATE.
    """
    data, store = cfg.data, cfg.store
    if is_elsewhere(cfg):
        folder, store_path = STATE / "data" / data.digest[:16], STATE / "store"
        paths = {"path": folder / "lists", "trajectories": folder / "trajectories"}
    else:
        paths = {name: getattr(data, name).resolve() for name in ("path", "trajectories")}
        store_path = store.path.resolve()
    return cfg.model_copy(
        update={
            "compute": "inline" if cfg.deterministic else "ray",
            "ray": cfg.ray.model_copy(update={"address": "auto"}),
            "data": data.model_copy(update=paths),
            "store": store.model_copy(update={"path": store_path}),
        }
    )


def arguments(job: Job) -> str:
    """Return the arguments of `agentgym step` for this job, quoted for a shell. One is the key: the
    command refuses the step if source, data or settings give another key on its machine.
    """
    return shlex.join((job.step, "--verbose", "--key", job.key))


def params_text(cfg: RunConfig) -> str:
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
