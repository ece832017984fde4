"""An attempt at a step as a job elsewhere: its name, what its cluster says of it, and what a way to
have it run must do.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agentgym.config import RunConfig
from agentgym.store.keys import object_name

POLL_S = 1.0
STOP_TIMEOUT_S = 60.0
STOP_GRACE_S = 20  # whole seconds a job has to end in order


class RayUnreachable(RuntimeError):
    """Nobody answers for the Ray cluster: its dashboard, or the API server that has its RayJobs."""


class RayJobFailed(RuntimeError):
    """The job ended without the step's result."""


class Phase(enum.Enum):
    """Where a job is on its way; each but the last has a deadline of its own."""

    QUEUED = "queued"  # held back by a queue of the cluster
    WAITING = "waiting"  # for room, and for its process
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Look:
    """What a cluster says of a job."""

    phase: Phase
    status: str  # the cluster's own word
    message: str = ""
    exit_code: int | None = None
    is_stopped: bool = False  # by somebody, not by its own end
    is_late: bool = False  # the cluster ended it at its deadline
    is_lost: bool = False  # what it ran on is gone; it is to be stopped


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run: a step, under the key that the submitter found."""

    step: str
    run_key: str
    key: str
    cfg: RunConfig

    def name(self, attempt: int) -> str:
        return object_name(self.run_key, self.step, attempt)


class Transport(Protocol):
    """A way to have jobs run. Methods raise OSError or RuntimeError where it does not answer."""

    place: str  # for people

    def attempts(self, job: Job) -> Mapping[int, Look]:
        """All that are known there, by their number."""
        ...

    def submit(self, job: Job, name: str) -> None:
        """Start it, unless it is there already. Errors: RayJobFailed, ConfigError."""
        ...

    def look(self, name: str) -> Look | None:
        """None where it is not known, or no longer."""
        ...

    async def tail(self, name: str, hear: Callable[[str], None]) -> None:
        """Pass every line of its log on once, until cancelled. Errors are tried again."""
        ...

    def stop(self, name: str) -> None:
        """Ask for its end."""
        ...

    def gone_means(self) -> str:
        """Why a job that was there may be unknown, for people."""
        ...

    def settle(self, job: Job) -> None:
        """The step is done: nothing of its attempts is needed any more."""
        ...


def numbered(names: Mapping[str, Look], job: Job) -> dict[int, Look]:
    """Those that are attempts of this job, by their number."""
    base = job.name(1)[:-1]
    return {
        int(name.removeprefix(base)): look
        for name, look in names.items()
        if re.fullmatch(rf"{base}[0-9]+", name)
    }
