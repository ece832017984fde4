"""Who may write to a step: one live holder at a time, each with a higher epoch than the one before.

Lease files are created, never changed and never deleted; the heartbeat is a file's modification time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from agentgym.store.files import create_exclusively, discard, write_temp

logger = logging.getLogger(__name__)


class LeaseHeld(RuntimeError):
    """Someone else is at work on this step; nothing was started."""


class Fenced(RuntimeError):
    """Someone newer took this step over; this writer must stop. The newer one's commits are untouched."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a lease."""

    epoch: int
    token: str  # unguessable, so two holders never look alike
    pid: int
    started: str | None  # start time of the process, to tell it from a later one of that pid; None where there is no /proc
    host: str
    space: str  # boot and pid namespace: inside one, a pid means one process; empty where unknown
    since: float  # seconds since 1970

    @classmethod
    def me(cls, epoch: int) -> Self:
        pid = os.getpid()
        return cls(epoch, secrets.token_hex(8), pid, process_start(pid), socket.gethostname(), pid_space(), time.time())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since} (epoch {self.epoch})"


def pid_space() -> str:
    """Equal for processes that can judge each other by pid; hosts may share a name, containers a machine. Empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Ticks from boot to the start of a running process; None where it is gone, a zombie, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Lease:
    """A held lease. A daemon thread keeps its file young until `release`."""

    def __init__(self, folder: Path, holder: Holder, ttl_s: float) -> None:
        self.folder = folder
        self.holder = holder
        self._path = folder / f"{holder.epoch:06d}.json"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(ttl_s / 4,), name=f"lease-{holder.epoch}", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, folder: Path, ttl_s: float, what: str) -> Self:
        """Take the next epoch of `folder`. Errors: LeaseHeld while the last holder lives; `what` names the step in it."""
        while True:
            epoch = newest_epoch(folder)
            me = Holder.me(epoch + 1)
            temp = write_temp(folder, json.dumps(asdict(me)).encode())
            try:
                if epoch and not _released(folder, epoch):
                    # the temporary file's time is "now" on the clock of the file system that stamps heartbeats
                    _refuse_if_alive(folder / f"{epoch:06d}.json", now=temp.stat().st_mtime, ttl_s=ttl_s, what=what)
                if create_exclusively(temp, folder / f"{me.epoch:06d}.json"):
                    return cls(folder, me, ttl_s)
            except FileNotFoundError:
                continue  # the live holder tidied the temporary file away
            finally:
                discard(temp)

    def check(self, what: str) -> None:
        """Errors: Fenced where a newer epoch exists."""
        epoch = newest_epoch(self.folder)
        if epoch > self.holder.epoch:
            newer = read_holder(self.folder / f"{epoch:06d}.json")
            raise Fenced(
                f"{what} was taken over by {newer}; this process ({self.holder.pid}, epoch {self.holder.epoch}) lost its lease "
                "and must stop, its uncommitted work is dropped"
            )

    def release(self) -> None:
        """Stop the heartbeat and say so on disk, so that the next holder need not wait. A failure is logged, not raised."""
        self._stop.set()
        self._thread.join()
        try:
            temp = write_temp(self.folder, b"")
            try:
                create_exclusively(temp, self.folder / f"{self.holder.epoch:06d}.released")
            finally:
                discard(temp)
        except OSError as error:
            logger.warning("lease %s could not be marked as released, it ends with this process: %s", self._path, error)

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                os.utime(self._path)
            except OSError as error:
                logger.warning("no heartbeat for lease %s: %s", self._path, error)


def newest_epoch(folder: Path) -> int:
    """0 where nobody was ever here."""
    return max((int(name[:-5]) for name in os.listdir(folder) if name.endswith(".json") and name[:-5].isdigit()), default=0)


def read_holder(path: Path) -> Holder:
    return Holder(**json.loads(path.read_bytes()))


def _released(folder: Path, epoch: int) -> bool:
    return (folder / f"{epoch:06d}.released").exists()


def _refuse_if_alive(path: Path, *, now: float, ttl_s: float, what: str) -> None:
    holder = read_holder(path)
    if (holder.host, holder.space) == (socket.gethostname(), pid_space()):
        if _runs(holder):
            raise LeaseHeld(f"{what} is held by {holder}; wait for it or stop that process")
        logger.info("%s: its last holder, %s, is gone; taking over", what, holder)
        return
    age_s = now - path.stat().st_mtime
    if age_s < ttl_s:
        raise LeaseHeld(
            f"{what} is held by {holder}, heard of {max(0.0, age_s):.1f}s ago; wait for it, stop that process, "
            f"or try again once it was silent for store.lease_ttl_s {ttl_s:g}"
        )
    logger.info("%s: its last holder, %s, was silent for %.0fs; taking over", what, holder, age_s)


def _runs(holder: Holder) -> bool:
    if holder.started is not None:
        return process_start(holder.pid) == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
