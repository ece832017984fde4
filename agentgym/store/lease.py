"""Who may write to a step: one live holder at a time, each with a higher epoch than the one
before.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from agentgym.trust import without_login

logger = logging.getLogger(__name__)

WAIT_POLL_S = 0.5
INTERRUPTED = "interrupted"  # reason of a lease whose holder was stopped from outside
T = TypeVar("T")


class LeaseHeld(RuntimeError):
    """Someone else is at work on this step; nothing was started."""


def when_free(call: Callable[[], T], wait_s: float) -> T:
    """What `call` gives, after up to `wait_s` seconds for another process that is at work on it;
    then LeaseHeld.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return call()
        except LeaseHeld:
            if time.monotonic() >= deadline:
                raise
            time.sleep(WAIT_POLL_S)


class Fenced(RuntimeError):
    """Someone newer took this step over; this writer must stop.
    The newer one's commits are untouched.
    """


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a lease."""

    epoch: int
    token: str  # unguessable, so two holders never look alike
    pid: int
    # start time of the process, to tell it from a later one of that pid; None where there is no
    # /proc
    started: str | None
    host: str
    space: str  # boot and pid namespace: inside one, a pid means one process; empty where unknown
    since: float  # seconds since 1970
    parents: tuple[str, ...] = ()  # digests of the manifests that its step builds on

    @classmethod
    def me(cls, epoch: int, parents: Sequence[str] = ()) -> Self:
        pid = os.getpid()
        return cls(
            epoch,
            secrets.token_hex(8),
            pid,
            process_start(pid),
            socket.gethostname(),
            pid_space(),
            time.time(),
            tuple(parents),
        )

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """As it was written. Errors: TypeError for what is no holder."""
        return cls(**{**tree, "parents": tuple(tree.get("parents", ()))})

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since} (epoch {self.epoch})"

    def refuse_if_alive(self, silent_s: float, *, ttl_s: float, what: str) -> None:
        """Errors: LeaseHeld while this holder lives: its process where it can be seen from
        here, else its heartbeat.
        """
        alive = self.is_alive(silent_s, ttl_s=ttl_s)
        if self.is_near():
            if alive:
                raise LeaseHeld(f"{what} is held by {self}; wait for it or stop that process")
            logger.info("%s: its last holder, %s, is gone; taking over", what, self)
            return
        if alive:
            raise LeaseHeld(
                f"{what} is held by {self}, heard of {max(0.0, silent_s):.1f}s ago; wait for it,"
                " stop that process, or try again once it was silent for store.lease_ttl_s"
                f" {ttl_s:g}"
            )
        logger.info(
            "%s: its last holder, %s, was silent for %.0fs; taking over", what, self, silent_s
        )

    def is_alive(self, silent_s: float, *, ttl_s: float) -> bool:
        """By its process where that can be seen from here, else by its heartbeat."""
        return self._runs() if self.is_near() else silent_s < ttl_s

    def is_near(self) -> bool:
        """Whether its process can be seen from here."""
        return (self.host, self.space) == (socket.gethostname(), pid_space())

    def _runs(self) -> bool:
        if self.started is not None:
            return process_start(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


MAX_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class Tenure:
    """The last time somebody held a lease, up to now."""

    holder: Holder
    alive: bool
    # why the lease was given back before its time; empty: it was not; None: it was not given back
    reason: str | None

    @property
    def was_interrupted(self) -> bool:
        """True where its process was ended from outside; False where the work itself failed."""
        return not self.reason or self.reason.startswith(INTERRUPTED)

    def __str__(self) -> str:
        if self.alive:
            return f"held by {self.holder}"
        if self.reason is None:
            return f"lost: {self.holder} is gone and left no word"
        return self.reason or "nobody is at work on it"


def reason_of(error: BaseException) -> str:
    """Return why a holder gives its lease back: one line, without logins."""
    if not isinstance(error, Exception):
        return f"{INTERRUPTED} ({type(error).__name__})"
    said = " ".join(without_login(str(error)).split())
    return f"{type(error).__name__}: {said}"[:MAX_REASON]


def pid_space() -> str:
    """Equal for processes that can judge each other by pid; hosts may share a name, containers
    a machine.
    Empty: unknown.
    """
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            + "/"
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Ticks from boot to the start of a running process; None where it is gone, a zombie, or
    where there is no /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Lease(ABC):
    """A held lease.
    A daemon thread keeps it young until `release`; what that takes is the back end's.
    """

    def __init__(self, holder: Holder, ttl_s: float, what: str) -> None:
        """Called last by a back end's own: the heart beats from here on."""
        self.holder = holder
        self._what = what
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(ttl_s / 4,), name=f"lease-{holder.epoch}", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def check(self) -> None:
        """Errors: Fenced where a newer holder exists."""

    @abstractmethod
    def commit(self, first: int, last: int, data: bytes) -> None:
        """Make `data` the manifests `first` to `last`, durably, after all blobs that were put.
        Errors: Fenced, with nothing committed.
        """

    @abstractmethod
    def drop(self, first: int) -> None:
        """Commits from `first` on count no more: their numbers are given anew.
        Errors: Fenced.
        """

    @abstractmethod
    def collect(self) -> None:
        """Remove all commits and their content, at once for everybody who looks from here on; a
        kill in between leaves files that count for nobody, and a second time removes them.
        Errors: Fenced.
        """

    @abstractmethod
    def begin_anew(self) -> None:
        """Make room for commits where they were collected before."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove what writers that were killed left half made, blobs apart. Result: how many."""

    @abstractmethod
    def _beat(self) -> None:
        """Keep the lease young."""

    @abstractmethod
    def _give_back(self, reason: str) -> None:
        """Let the next holder know that it need not wait, and everybody why it ended."""

    def release(self, reason: str = "") -> None:
        """Stop the heartbeat and give the lease back. reason: why before its time, if so.
        A failure is logged, not raised: the lease then ends with this process.
        """
        self._stop.set()
        self._thread.join()
        try:
            self._give_back(reason)
        except Fenced:
            pass  # somebody else's already
        except (OSError, ValueError) as error:
            logger.warning(
                "the lease on %s could not be marked as released, it ends with this process: %s",
                self._what,
                error,
            )

    def _live(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self._beat()
            except Fenced as error:
                logger.error("%s", error)
                return
            except (OSError, ValueError) as error:
                logger.warning("no heartbeat for the lease on %s: %s", self._what, error)

    def _fenced_by(self, newer: Holder) -> Fenced:
        return Fenced(
            f"{self._what} was taken over by {newer}; this process ({self.holder.pid}, epoch"
            f" {self.holder.epoch}) lost its lease and must stop, its uncommitted work is dropped"
        )
