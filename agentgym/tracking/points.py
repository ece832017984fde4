"""Metrics of a step in the store, to be delivered to MLflow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
