"""Leases, and other interfaces of back ends. A step has one live writer at a time, each with a
higher epoch than the one before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from agentgym.store.manifest import Blob
from agentgym.trust import without_login

logger = logging.getLogger(__name__)

WAIT_POLL_S = 0.5
INTERRUPTED = "interrupted"  # reason of a lease whose holder was stopped from outside
T = TypeVar("T")


class LeaseHeld(RuntimeError):
    """Another process is at work on this step; nothing was started."""


def when_free(call: Callable[[], T], wait_s: float) -> T:
    """Return the result of `call`, which is repeated while it raises LeaseHeld.
    Errors: LeaseHeld after `wait_s` seconds, and other errors of `call` at once.
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
    """Another process took this step over or deleted it, or a commit number is used already.
    This writer must stop; commits that others made are untouched.
    """


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that took a lease."""

    epoch: int
    token: str  # unguessable, so two holders never look alike
    pid: int
    # start time of the process, to distinguish it from a later one with that pid; None without
    # /proc
    started: str | None
    host: str
    space: str  # boot and pid namespace: inside one, a pid means one process; empty if unknown
    since: float  # seconds since 1970
    parents: tuple[str, ...] = ()  # digests of the manifests that its step builds on

    @classmethod
    def me(cls, epoch: int, parents: Sequence[str] = ()) -> Self:
        pid, here = os.getpid(), (socket.gethostname(), pid_space())
        me = pid, process_start(pid), *here
        return cls(epoch, secrets.token_hex(8), *me, time.time(), tuple(parents))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Return the holder that was written as this tree. Errors: TypeError for other trees."""
        return cls(**{**tree, "parents": tuple(tree.get("parents", ()))})

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since} (epoch {self.epoch})"

    def refuse_if_alive(self, silent_s: float, *, ttl_s: float, what: str) -> None:
        """Raise LeaseHeld if this holder is alive, else log the takeover.
        silent_s, ttl_s: see `is_alive`. what: the step in messages.
        """
        is_alive, is_near = self.is_alive(silent_s, ttl_s=ttl_s), self.is_near()
        if is_alive and is_near:
            raise LeaseHeld(f"{what} is held by {self}; wait for it or stop that process")
        if is_alive:
            raise LeaseHeld(
                f"{what} is held by {self}, heard of {max(0.0, silent_s):.1f}s ago; wait for it,"
                " stop that process, or try again once it was silent for store.lease_ttl_s"
                f" {ttl_s:g}"
            )
        end = "is gone" if is_near else f"was silent for {silent_s:.0f}s"
        logger.info("%s: its last holder, %s, %s; taking over", what, self, end)

    def is_alive(self, silent_s: float, *, ttl_s: float) -> bool:
        """Return True if the holder's process runs or, if it is not visible from here, if its last
        heartbeat is less than `ttl_s` seconds old. silent_s: age of this heartbeat.
        """
        return self._runs() if self.is_near() else silent_s < ttl_s

    def is_near(self) -> bool:
        """Return True if its process is visible from here: same host, boot and pid namespace."""
        return (self.host, self.space) == (socket.gethostname(), pid_space())

    def _runs(self) -> bool:
        if self.started is not None:
            return process_start(self.pid) == self.started
        import psutil  # takes as long to import as all of this room

        return bool(psutil.pid_exists(self.pid))


MAX_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class Tenure:
    """The latest tenure of a lease: its holder, and how it ended."""

    holder: Holder
    alive: bool
    # why the lease was released early; empty: released at the end; None: never released
    reason: str | None

    @property
    def was_interrupted(self) -> bool:
        """False if the work itself failed; True for every other end, also a normal one, and before
        the end.
        """
        return not self.reason or self.reason.startswith(INTERRUPTED)

    def __str__(self) -> str:
        if self.alive:
            return f"held by {self.holder}"
        if self.reason is None:
            return f"lost: {self.holder} is gone and left no word"
        return self.reason or "nobody is at work on it"


def reason_of(error: BaseException) -> str:
    """Return `error` as the reason for releasing a lease early: type and message on one line, at
    most MAX_REASON characters, URLs without logins.
    If it is no Exception, for example a KeyboardInterrupt: INTERRUPTED and the type alone.
    """
    if not isinstance(error, Exception):
        return f"{INTERRUPTED} ({type(error).__name__})"
    message = " ".join(without_login(str(error)).split())
    return f"{type(error).__name__}: {message}"[:MAX_REASON]


def pid_space() -> str:
    """Return the boot id and pid namespace, equal for processes that see each other's pids; empty
    if unknown. Hosts may share a name, and containers a machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return ticks from boot to a process's start, as text; None if gone, a zombie, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Lease(ABC):
    """A lease of this process. A daemon thread renews it by `_beat` until `release`, or until a
    newer holder has it, which it logs.
    """

    def __init__(self, holder: Holder, ttl_s: float, what: str) -> None:
        """Start the heartbeat, one in `ttl_s` / 4 seconds. what: the step in messages.
        A back end's constructor calls this last.
        """
        self.holder = holder
        self._what = what
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(ttl_s / 4,), name=f"lease-{holder.epoch}", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def check(self) -> None:
        """Raise Fenced if there is a newer holder, or if the step is gone from S3."""

    @abstractmethod
    def commit(self, first: int, last: int, data: bytes) -> None:
        """Write `data`, the file of the manifests with seq `first` to `last`, durably and after all
        blobs that were put. Errors: Fenced, with nothing committed.
        """

    @abstractmethod
    def drop(self, first: int) -> None:
        """Drop the commits from `first` on; their numbers are used again. Errors: Fenced."""

    @abstractmethod
    def collect(self) -> None:
        """Remove all commits, atomically for readers, and then their content.
        A kill in between leaves files that no reader counts; a second call removes them.
        Errors: Fenced.
        """

    @abstractmethod
    def begin_anew(self) -> None:
        """If the commits were collected, remove leftovers and allow new commits. Errors: Fenced."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove temporary files, incomplete uploads and uncommitted manifests of killed writers,
        but no whole blobs. Return their number. Errors: Fenced.
        """

    @abstractmethod
    def _beat(self) -> None:
        """Renew the lease."""

    @abstractmethod
    def _give_back(self, reason: str) -> None:
        """Mark the lease as released, for the next holder, and store the reason."""

    def release(self, reason: str = "") -> None:
        """Stop the heartbeat and release the lease. reason: why it is released early, if so.
        A failure is logged, not raised: the lease then ends with this process.
        """
        self._stop.set()
        self._thread.join()
        try:
            self._give_back(reason)
        except Fenced:
            pass  # a newer holder has it already
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


U = TypeVar("U")


class Content(Protocol):
    """Content that is stored piece by piece, because memory has no room for a second copy."""

    @property
    def size(self) -> int:
        """Size of the content in bytes."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the pieces in order, the same ones at every call."""


def digest_of(content: Content) -> str:
    """Return the sha256 of streamed content, 64 hex digits."""
    digest = hashlib.sha256()
    for piece in content.pieces():
        digest.update(piece)
    return digest.hexdigest()


class Folder(Protocol):
    """One step's folder in a back end. Reading a missing name raises FileNotFoundError."""

    place: str  # path or URL, for messages

    def commits(self) -> dict[int, str]:
        """Return seq of each commit's first manifest -> name of its file, in order; {} if collected
        or there is no folder.
        """

    def read(self, name: str) -> bytes: ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on. Errors: EOFError."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def digest(self, name: str) -> str:
        """Return the sha256 of a file's content, read once and streamed."""

    def blobs(self) -> set[str]:
        """Return the digests of all blobs, also unused ones. The step must have had a lease."""

    def put(self, blob: Blob, data: bytes) -> None:
        """Store `data` whole under its digest. Errors: StoreFull."""

    def stream(self, content: Content) -> Blob:
        """Store content whole, with few pieces in memory; return its Blob. Errors: StoreFull."""

    def remove(self, digest: str) -> None:
        """Remove a blob, if it is there."""

    def collected(self) -> bool:
        """Return True if `RunStore.collect` removed the commits and there is no new one."""

    def num_bytes(self) -> int:
        """Return the bytes of all files. A file that n steps share counts 1/n here."""

    def has_content(self) -> bool:
        """Return True if there is a file of a manifest or blob, even one of no commit."""

    def tenure(self, ttl_s: float) -> Tenure | None:
        """Return the last tenure of the step's lease; None if no process ever held it.
        ttl_s: see `Holder.is_alive`.
        """

    def acquire(self, ttl_s: float, what: str, parents: Sequence[str] = ()) -> Lease:
        """Take the step's lease; `what` names the step in messages, `parents` the manifests it
        builds on, by digest. ttl_s: see `Holder.is_alive`. Errors: LeaseHeld.
        """


class Backend(Protocol):
    """Storage of the folders of all steps."""

    root: str

    def folders(self) -> list[str]: ...

    def folder(self, name: str) -> Folder: ...

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Apply `function` to the items; results in order. Concurrent if that is faster."""
