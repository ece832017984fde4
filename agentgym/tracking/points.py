"""Metrics of a step in the store, to be delivered to MLflow."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SPOOL = "metrics.jsonl"  # name among a manifest's records


METRIC_NAME = re.compile(r"[A-Za-z0-9_\-.: /]{1,250}")  # what MLflow accepts


class LedgerError(ValueError):
    """Data that the ledger cannot accept, or an experiment that was deleted."""


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics of one step and their time, fixed when measured so that deliveries are equal."""

    step: int
    time_ms: int  # milliseconds since 1970
    metrics: dict[str, float]


def encode_points(points: Iterable[Point]) -> bytes:
    """Return JSON lines for `manifest.records["metrics.jsonl"]`.

    Errors: LedgerError for a bad name, NaN or infinity.
    """
    return b"".join(_encode(point) for point in points)


def decode_points(data: bytes) -> list[Point]:
    """Parse JSON lines of points. Errors: LedgerError for a line that is not a point."""
    points = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise LedgerError(
                f"line {number} of {SPOOL} is not a point ({error}): {line[:80]!r}; the spool is"
                " damaged, verify the store"
            ) from None
    return points


def _encode(point: Point) -> bytes:
    metrics = {}
    for name, value in point.metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise LedgerError(
                f"metric name {name!r} at step {point.step} may hold letters, digits, _ - . : space"
                " and /; write pass_at_1 for pass@1"
            )
        metrics[name] = float(value)
        if not math.isfinite(metrics[name]):
            raise LedgerError(
                f"metric {name} is {value} at step {point.step}; leave out what is undefined, and"
                " stop a run that diverged"
            )
    return (
        json.dumps(
            {"step": point.step, "time_ms": point.time_ms, "metrics": metrics}, allow_nan=False
        ).encode()
        + b"\n"
    )


PROGRESS = "progress/"
TURNS, TOKENS = f"{PROGRESS}turns", f"{PROGRESS}tokens"
_PER_EPISODE = {TURNS: "rollout/turns_mean", TOKENS: "rollout/tokens_mean"}


def progressed(before: Sequence[Point], point: Point) -> dict[str, float]:
    """Return turns and tokens (observations and actions) of the episodes that count, so far.

    Empty if the point has no episodes. before: the run's training points so far, in order.
    """
    metric_of = point.metrics.get
    if metric_of("rollout/num_episodes") is None:
        return {}
    last = next((earlier.metrics for earlier in reversed(before) if TURNS in earlier.metrics), {})
    played = metric_of("rollout/num_episodes", 0.0) * (
        1.0 - metric_of("rollout/env_error_frac", 0.0)
    )
    return {
        name: last.get(name, 0.0) + round(played * metric_of(metric, 0.0))
        for name, metric in _PER_EPISODE.items()
    }


SYSTEM = "system/"  # shown in MLflow's tab of system metrics
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
        return {f"{SYSTEM}{name}": round(value, 1) for name, value in metrics.items()}


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
