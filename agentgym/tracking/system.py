"""What a step asks of its machine, under the names that MLflow shows as system metrics.

Like its times, they lie among a commit's records: no key, digest or result knows them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PREFIX = "system/"  # what MLflow's tab of system metrics shows
EVERY_S = 5.0  # between two readings: one takes milliseconds


class SystemMetrics:
    """Of this process, those it started, and the machine."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """folder: of the state, whose disk is looked at."""
        self._folder, self._clock = folder, clock
        self._read_at, self._cpu_s = clock(), _cpu_s()
        self._due = self._read_at  # the first reading, however soon
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """Since the last reading; empty where that was just now."""
        now = self._clock()
        if now < self._due or now == self._read_at:
            return {}
        cpu_s, before = _cpu_s(), self._cpu_s
        spent = sum(seconds - before.get(each, 0.0) for each, seconds in cpu_s.items())
        found = {
            "process_cpu_percentage": 100 * spent / (now - self._read_at),
            "process_memory_megabytes": sum(map(_memory, cpu_s)) / 1e6,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_percentage": psutil.virtual_memory().percent,
        }
        with contextlib.suppress(OSError):  # a state that is elsewhere
            found["disk_available_megabytes"] = psutil.disk_usage(str(self._folder)).free / 1e6
        self._read_at, self._cpu_s, self._due = now, cpu_s, now + EVERY_S
        return {f"{PREFIX}{name}": round(value, 1) for name, value in found.items()}


def _cpu_s() -> dict[psutil.Process, float]:
    """Processor seconds of each live process of the tree."""
    me, found = psutil.Process(), {}
    for each in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            times = each.cpu_times()
            found[each] = times.user + times.system
    return found


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
