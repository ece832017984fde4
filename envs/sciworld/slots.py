"""A few Java processes with reusable slots, one game each: who gets which, and that a bad process is replaced."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.sciworld.jvm import Answer, GameFailed, Jvm, JvmLost

logger = logging.getLogger(__name__)

SLOTS_PER_JVM = 8
CALL_TIMEOUT_S = 60.0  # of one call: what takes longer is stuck; also for loading a new slot's classes on a busy machine
HEAP_MIB = (96, 24)  # of one process: to begin with, and for each slot
IDLE_S = 60.0  # a process nobody needed for so long ends, but the first
GROWN = 2.5  # a process that holds more than this times its heap is replaced: half of that is its classes and compiled code


class Place(Protocol):
    """Where one game is played. One thread at a time uses it."""

    def call(self, operation: str, *texts: str) -> Answer:
        """Operations and texts as `java/Slots.java` lists them. Errors: GameFailed, JvmLost."""
        ...


class Pool(Protocol):
    """Thread-safe."""

    restarts: int  # processes that were lost or replaced

    @property
    def pids(self) -> list[int]: ...

    @property
    def engine_s(self) -> float:
        """CPU seconds of all games so far."""
        ...

    def acquire(self) -> Place: ...

    def release(self, place: Any) -> None: ...

    def close(self) -> None:
        """End every process. The pool may be used again."""
        ...


@dataclass(eq=False, slots=True)
class Process:
    jvm: Jvm
    taken: int = 0  # slots open, in use or free
    free: list[Slot] = field(default_factory=list)  # the one used last at the end
    retired: bool = False  # gets no new sessions; ends with its last one
    idle_since: float = math.inf

    @property
    def idle(self) -> bool:
        return len(self.free) == self.taken


@dataclass(eq=False, slots=True)
class Slot:
    """One game's place. Its user calls it from one thread at a time and gives it back."""

    process: Process
    number: int
    pool: SlotPool
    broken: bool = False

    def call(self, operation: str, *texts: str) -> Answer:
        """Errors: GameFailed, JvmLost; either way the slot is not used again."""
        try:
            return self.pool.call(self.process.jvm, operation, self.number, texts)
        except (GameFailed, JvmLost):
            self.broken = True
            raise


class SlotPool:
    """Thread-safe. Processes start when they are needed and stay for a while: a used slot opens the next game in a tenth of the time."""

    def __init__(self, slots_per_jvm: int = SLOTS_PER_JVM, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.restarts = 0  # processes that were lost or replaced
        self._slots_per_jvm = slots_per_jvm
        self._heap_mib = HEAP_MIB[0] + HEAP_MIB[1] * slots_per_jvm
        self._call_timeout_s = call_timeout_s
        self._engine = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))  # more threads than cores only wait for each other
        self._gate = threading.Lock()
        self._processes: list[Process] = []  # the first ones are used first
        self._next_number = 0
        self._ended_engine_s = 0.0

    @property
    def pids(self) -> list[int]:
        with self._gate:
            return [process.jvm.pid for process in self._processes]

    @property
    def engine_s(self) -> float:
        with self._gate:
            return self._ended_engine_s + sum(process.jvm.engine_s for process in self._processes)

    def call(self, jvm: Jvm, operation: str, slot: int, texts: Sequence[str] = ()) -> Answer:
        with self._engine:  # held by calls that end within their time
            return jvm.call(operation, slot, texts, timeout_s=self._call_timeout_s)

    def acquire(self) -> Slot:
        """A free slot, of the first process that has one, else a new one. Errors: GameFailed, JvmLost."""
        with self._gate:
            self._bury()
            for process in self._processes:
                if process.free and not process.retired:
                    return process.free.pop()
            process = self._place()
            process.taken += 1
            self._next_number += 1
            slot = Slot(process, self._next_number, self)
        try:
            self.call(process.jvm, "o", slot.number)
        except (GameFailed, JvmLost):
            slot.broken = True
            self.release(slot)
            raise
        return slot

    def release(self, slot: Slot) -> None:
        process = slot.process
        with self._gate:
            if process.jvm.alive and process.jvm.rss_mib() > GROWN * self._heap_mib and not process.retired:
                process.retired = True
                logger.warning("Java process %d holds %.0f MiB; it is replaced", process.jvm.pid, process.jvm.rss_mib())
            keep = process.jvm.alive and not slot.broken and not process.retired
            if keep:
                process.free.append(slot)
            else:
                process.taken -= 1
            if process.idle:
                process.idle_since = time.monotonic()
            if keep:
                return
            end = process.retired and process.idle
        if end:
            process.jvm.close("replaced")
        else:
            with contextlib.suppress(GameFailed, JvmLost):  # then it is gone anyway
                self.call(process.jvm, "d", slot.number)

    def close(self) -> None:
        with self._gate:
            processes, self._processes = self._processes, []
            self._ended_engine_s += sum(process.jvm.engine_s for process in processes)
        for process in processes:
            process.jvm.close()

    def _place(self) -> Process:
        for process in self._processes:
            if process.taken < self._slots_per_jvm and not process.retired:
                return process
        process = Process(Jvm(self._heap_mib))
        self._processes.append(process)
        logger.info("Java process %d started: up to %d games, heap %d MiB", process.jvm.pid, self._slots_per_jvm, self._heap_mib)
        return process

    def _bury(self) -> None:
        """Forget processes that are gone, and those but the first that nobody needed for a while. Holds the gate."""
        dead = [process for process in self._processes if not process.jvm.alive]
        long_ago = time.monotonic() - IDLE_S
        idle = [process for process in self._processes[1:] if process.idle and process.idle_since < long_ago]
        for process in {*dead, *idle}:
            self._processes.remove(process)
            self._ended_engine_s += process.jvm.engine_s
            process.jvm.close("not needed")
        self.restarts += len(dead)
