"""A pool of Java processes with reusable slots, one game each. It assigns slots and replaces
processes that died or use too much memory.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.sciworld.jvm import GameFailed, Jvm, JvmLost

logger = logging.getLogger(__name__)

SLOTS_PER_JVM = 8
# of one call, enough to load a new slot's classes on a busy machine; a longer call is stuck
CALL_TIMEOUT_S = 60.0
HEAP_MIB = (96, 24)  # of one process: base, and for each slot
IDLE_S = 60.0  # a process unused for so long ends, except the first
# these two load most of the classes that the other tasks need
WARM_TASKS = ("boil", "test-conductivity")
# a process is replaced if its memory exceeds this times its heap; classes and compiled code take
# half of that
GROWN = 2.5


class Place(Protocol):
    """The interface to one game, used by one thread at a time."""

    def call(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation and return its texts; `java/Slots.java` lists the operations.
        Errors: GameFailed, JvmLost.
        """

    async def call_async(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation, see `call`."""


class Pool(Protocol):
    """A thread-safe pool of games."""

    @property
    def restarts(self) -> int:
        """Number of processes that were lost or replaced."""

    @property
    def pids(self) -> list[int]: ...

    @property
    def engine_s(self) -> float:
        """CPU seconds that the engine used for all games so far; 0 if not measured."""

    def warm(self, num_games: int) -> None:
        """Do the slow setup of up to num_games games in advance; a pool may prepare fewer or none.
        Errors: GameFailed, JvmLost.
        """

    def acquire(self) -> Place: ...

    def release(self, slot: Any) -> None: ...

    def close(self) -> None:
        """End every process. The pool may be used again."""


@dataclass(eq=False, slots=True)
class Process:
    jvm: Jvm
    num_slots: int
    # popped from the end: the slot used last is there, unused ones are at the beginning
    free: list[Slot] = field(default_factory=list)
    retired: bool = False  # gets no new sessions; ends with its last one
    idle_since: float = math.inf

    @property
    def idle(self) -> bool:
        return len(self.free) == self.num_slots


@dataclass(eq=False, slots=True)
class Slot:
    """A slot for one game in a process. Use it from one thread at a time, then release it."""

    process: Process
    number: int
    pool: SlotPool
    open: bool = False
    broken: bool = False

    def call(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation of the slot's game and return its answer, see `Place.call`.

        Errors: GameFailed, JvmLost; after either, release the slot and call nothing more on it.
        """
        try:
            return self.process.jvm.call(
                operation, self.number, texts, timeout_s=self.pool._call_timeout_s
            )
        except (GameFailed, JvmLost):
            self.broken = True
            raise

    async def call_async(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation without blocking a thread, see `call`."""
        try:
            return await self.process.jvm.call_async(
                operation, self.number, texts, timeout_s=self.pool._call_timeout_s
            )
        except (GameFailed, JvmLost):
            self.broken = True
            raise


class SlotPool:
    """A thread-safe pool of slots.
    Processes start when needed and stay for a while: a used slot opens the next game in a tenth of
    the time.
    """

    def __init__(
        self, slots_per_jvm: int = SLOTS_PER_JVM, call_timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._slots_per_jvm = slots_per_jvm
        self._heap_mib = HEAP_MIB[0] + HEAP_MIB[1] * slots_per_jvm
        self._call_timeout_s = call_timeout_s
        self._gate = threading.Lock()
        self._processes: list[Process] = []  # the first ones are used first
        self._num_buried = 0
        self._ended_engine_s = 0.0

    @property
    def restarts(self) -> int:
        with self._gate:
            return self._num_buried + sum(not process.jvm.alive for process in self._processes)

    @property
    def pids(self) -> list[int]:
        with self._gate:
            return [process.jvm.pid for process in self._processes]

    @property
    def engine_s(self) -> float:
        with self._gate:
            return self._ended_engine_s + sum(process.jvm.engine_s for process in self._processes)

    def acquire(self) -> Slot:
        """Return a free slot of the first process that has one, else of a new process.
        Errors: GameFailed, JvmLost.
        """
        slot = self._take()
        try:
            self._open(slot)
        except (GameFailed, JvmLost):
            self.release(slot)
            raise
        return slot

    def warm(self, num_games: int) -> None:
        """Load two tasks in up to num_games slots, at most one process's, then release the slots:
        slots share neither classes nor compiled code. Errors: GameFailed, JvmLost.
        """
        slots: list[Slot] = []
        try:
            slots += (self._take() for _ in range(min(num_games, self._slots_per_jvm)))
            with ThreadPoolExecutor(len(slots)) as threads:
                list(threads.map(self._open, slots))
                for task in WARM_TASKS:
                    list(threads.map(lambda slot, task=task: slot.call("l", task, "0"), slots))
        finally:
            for slot in slots:
                self.release(slot)

    def release(self, slot: Slot) -> None:
        process = slot.process
        with self._gate:
            rss_mib = process.jvm.rss_mib() if process.jvm.alive else 0.0
            if rss_mib > GROWN * self._heap_mib and not process.retired:
                process.retired = True
                message = "Java process %d holds %.0f MiB; it is replaced"
                logger.warning(message, process.jvm.pid, rss_mib)
            if slot.broken:
                process.free.insert(0, Slot(process, slot.number, self))
            else:
                process.free.append(slot)
            if process.idle:
                process.idle_since = time.monotonic()
            end = process.retired and process.idle
        if end:
            process.jvm.close("replaced")

    def close(self) -> None:
        with self._gate:
            processes, self._processes = self._processes, []
            self._ended_engine_s += sum(process.jvm.engine_s for process in processes)
        for process in processes:
            process.jvm.close()

    def _take(self) -> Slot:
        with self._gate:
            self._bury()
            free = (process for process in self._processes if process.free and not process.retired)
            return (next(free, None) or self._start()).free.pop()

    def _open(self, slot: Slot) -> None:
        """Load the slot's classes unless they are loaded. Errors: GameFailed, JvmLost."""
        if not slot.open:
            slot.call("o")
            slot.open = True

    def _start(self) -> Process:
        heap_mib, num_slots = self._heap_mib, self._slots_per_jvm
        process = Process(Jvm(heap_mib, num_slots), num_slots)
        process.free += [Slot(process, number, self) for number in range(num_slots)]
        self._processes.append(process)
        message = "Java process %d started: up to %d games, heap %d MiB"
        logger.info(message, process.jvm.pid, num_slots, heap_mib)
        return process

    def _bury(self) -> None:
        """Close and remove dead processes and, except for the first process, those idle for IDLE_S.
        The caller must have locked `_gate`.
        """
        dead = [process for process in self._processes if not process.jvm.alive]
        long_ago = time.monotonic() - IDLE_S
        idle = [p for p in self._processes[1:] if p.idle and p.idle_since < long_ago]
        for process in {*dead, *idle}:
            self._processes.remove(process)
            self._ended_engine_s += process.jvm.engine_s
            process.jvm.close("not needed")
        self._num_buried += len(dead)
