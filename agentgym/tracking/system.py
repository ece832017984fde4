"""A step's use of its machine, under the names that MLflow shows as system metrics.

They are stored in a commit's records like its times, and enter no key, digest or result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PREFIX = "system/"  # shown in MLflow's tab of system metrics
EVERY_S = 5.0  # minimum time between two readings; one takes milliseconds


class SystemMetrics:
    """Metrics of this process, its children, and the machine."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to measure.

        folder: of the state; its disk is measured.
        """
        self._folder, self._clock = folder, clock
        self._read_at, self._cpu_s = clock(), _cpu_s()
        self._due = self._read_at  # the first reading, however soon
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return the metrics since the last reading; empty within EVERY_S of it."""
        now = self._clock()
        if now < self._due or now == self._read_at:
            return {}
        cpu_s, before = _cpu_s(), self._cpu_s
        spent = sum(seconds - before.get(process, 0.0) for process, seconds in cpu_s.items())
        metrics = {
            "process_cpu_percentage": 100 * spent / (now - self._read_at),
            "process_memory_megabytes": sum(map(_memory, cpu_s)) / 1e6,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_percentage": psutil.virtual_memory().percent,
        }
        with contextlib.suppress(OSError):  # the state folder may be remote
            metrics["disk_available_megabytes"] = psutil.disk_usage(str(self._folder)).free / 1e6
        self._read_at, self._cpu_s, self._due = now, cpu_s, now + EVERY_S
        return {f"{PREFIX}{name}": round(value, 1) for name, value in metrics.items()}


def _cpu_s() -> dict[psutil.Process, float]:
    """Return the CPU seconds of this process and of each of its live descendants."""
    root, seconds = psutil.Process(), {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            times = process.cpu_times()
            seconds[process] = times.user + times.system
    return seconds


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
