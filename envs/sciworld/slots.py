"""A few Java processes with reusable slots, one game each: who gets which, and that a bad
process is replaced.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.sciworld.jvm import Answer, GameFailed, Jvm, JvmLost

logger = logging.getLogger(__name__)

SLOTS_PER_JVM = 8
# of one call: what takes longer is stuck; also for loading a new slot's classes on a busy machine
CALL_TIMEOUT_S = 60.0
HEAP_MIB = (96, 24)  # of one process: to begin with, and for each slot
IDLE_S = 60.0  # a process nobody needed for so long ends, but the first
# loading these two leaves little of what other tasks load for the first time
WARM_TASKS = ("boil", "test-conductivity")
# a process that holds more than this times its heap is replaced: half of that is its classes and
# compiled code
GROWN = 2.5


class Place(Protocol):
    """Where one game is played. One thread at a time uses it."""

    def call(self, operation: str, *texts: str) -> Answer:
        """Operations and texts as `java/Slots.java` lists them. Errors: GameFailed, JvmLost."""
        ...

    async def call_async(self, operation: str, *texts: str) -> Answer:
        """As `call`."""
        ...


class Pool(Protocol):
    """Thread-safe."""

    @property
    def restarts(self) -> int:
        """Processes that were lost or replaced."""
        ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def engine_s(self) -> float:
        """CPU seconds of all games so far."""
        ...

    def warm(self, num_games: int) -> None:
        """Have places for so many games ready, as far as that is worth its memory.
        Errors: GameFailed, JvmLost.
        """
        ...

    def acquire(self) -> Place: ...

    def release(self, place: Any) -> None: ...

    def close(self) -> None:
        """End every process. The pool may be used again."""
        ...


@dataclass(eq=False, slots=True)
class Process:
    jvm: Jvm
    num_slots: int
    # the one used last at the end, those never used at the beginning
    free: list[Slot] = field(default_factory=list)
    retired: bool = False  # gets no new sessions; ends with its last one
    idle_since: float = math.inf

    @property
    def idle(self) -> bool:
        return len(self.free) == self.num_slots


@dataclass(eq=False, slots=True)
class Slot:
    """One game's place. Its user calls it from one thread at a time and gives it back."""

    process: Process
    number: int
    pool: SlotPool
    open: bool = False
    broken: bool = False

    def call(self, operation: str, *texts: str) -> Answer:
        """Errors: GameFailed, JvmLost; either way the slot is not used again."""
        try:
            return self.process.jvm.call(
                operation, self.number, texts, timeout_s=self.pool._call_timeout_s
            )
        except (GameFailed, JvmLost):
            self.broken = True
            raise

    async def call_async(self, operation: str, *texts: str) -> Answer:
        """As `call`, without a thread."""
        try:
            return await self.process.jvm.call_async(
                operation, self.number, texts, timeout_s=self.pool._call_timeout_s
            )
        except (GameFailed, JvmLost):
            self.broken = True
            raise


class SlotPool:
    """Thread-safe.
    Processes start when they are needed and stay for a while: a used slot opens the next game in a
    tenth of the time.
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
        """Processes that were lost or replaced."""
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
        """A free slot, of the first process that has one, else of a new one.
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
        """Open up to one process's slots and load each twice: a slot's classes are its own, and so
        is their compiled code.

        Errors: GameFailed, JvmLost.
        """
        slots = [self._take() for _ in range(min(num_games, self._slots_per_jvm))]
        try:
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
            if (
                process.jvm.alive
                and process.jvm.rss_mib() > GROWN * self._heap_mib
                and not process.retired
            ):
                process.retired = True
                logger.warning(
                    "Java process %d holds %.0f MiB; it is replaced",
                    process.jvm.pid,
                    process.jvm.rss_mib(),
                )
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
            process = (
                next(
                    (
                        process
                        for process in self._processes
                        if process.free and not process.retired
                    ),
                    None,
                )
                or self._start()
            )
            return process.free.pop()

    def _open(self, slot: Slot) -> None:
        """Load the slot's classes, once. Errors: GameFailed, JvmLost."""
        if not slot.open:
            slot.call("o")
            slot.open = True

    def _start(self) -> Process:
        process = Process(Jvm(self._heap_mib, self._slots_per_jvm), self._slots_per_jvm)
        process.free += [Slot(process, number, self) for number in range(self._slots_per_jvm)]
        self._processes.append(process)
        logger.info(
            "Java process %d started: up to %d games, heap %d MiB",
            process.jvm.pid,
            self._slots_per_jvm,
            self._heap_mib,
        )
        return process

    def _bury(self) -> None:
        """Forget processes that are gone, and those but the first that nobody needed for a
        while.
        Holds the gate.
        """
        dead = [process for process in self._processes if not process.jvm.alive]
        long_ago = time.monotonic() - IDLE_S
        idle = [
            process
            for process in self._processes[1:]
            if process.idle and process.idle_since < long_ago
        ]
        for process in {*dead, *idle}:
            self._processes.remove(process)
            self._ended_engine_s += process.jvm.engine_s
            process.jvm.close("not needed")
        self._num_buried += len(dead)
