"""Metrics of a step in the store, to be delivered to MLflow, and the alarms of a training run.

Alarms are a pure function of the committed metrics. A rule compares a measure of several optimizer
steps with its limit. If the limit is broken, the measure is stored as `alarm/NAME` and the limit
as `alarm/NAME_limit`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import psutil

from agentgym.config import AlarmsConfig

SPOOL = "metrics.jsonl"  # name among a manifest's records
METRIC_NAME = re.compile(r"[A-Za-z0-9_\-.: /]{1,250}")  # what MLflow accepts


class LedgerError(ValueError):
    """Error for data that MLflow cannot accept, damaged metrics, or a deleted experiment."""


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics at one optimizer step. Their time is fixed, so that repeated deliveries are equal."""

    step: int
    time_ms: int  # milliseconds since 1970
    metrics: dict[str, float]


def encode_points(points: Iterable[Point]) -> bytes:
    """Return points as JSON lines. Errors: LedgerError for a bad name, NaN or infinity."""
    return b"".join(map(_encode, points))


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
    row = {"step": point.step, "time_ms": point.time_ms, "metrics": metrics}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


PROGRESS = "progress/"
TURNS, TOKENS = f"{PROGRESS}turns", f"{PROGRESS}tokens"
_PER_EPISODE = {TURNS: "rollout/turns_mean", TOKENS: "rollout/tokens_mean"}


def progressed(before: Sequence[Point], point: Point) -> dict[str, float]:
    """Return TURNS and TOKENS -> sum over all training episodes of the run, with this point's.

    Episodes that ended as `env_error` are left out. Tokens are those of observations and actions.
    Empty if the point has no episodes. before: the run's training points so far, in order.
    """
    metric_of = point.metrics.get
    if (num_episodes := metric_of("rollout/num_episodes")) is None:
        return {}
    last = next((earlier.metrics for earlier in reversed(before) if TURNS in earlier.metrics), {})
    played = num_episodes * (1.0 - metric_of("rollout/env_error_frac", 0.0))
    return {
        name: last.get(name, 0.0) + round(played * metric_of(metric, 0.0))
        for name, metric in _PER_EPISODE.items()
    }


SYSTEM = "system/"  # shown in MLflow's tab of system metrics
EVERY_S = 5.0  # minimum time between two readings; one takes milliseconds


class SystemMetrics:
    """CPU, memory and disk metrics of this process with its descendants, and of the machine."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to measure. folder: the state folder, whose disk is measured; clock: seconds."""
        self._folder, self._clock = folder, clock
        self._read_at, self._cpu_s = clock(), _cpu_s()
        self._due = self._read_at  # the first reading need not wait
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return `system/NAME` -> value, CPU since the last reading; {} within EVERY_S of it."""
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
        with contextlib.suppress(psutil.Error):  # the process ended meanwhile
            times = process.cpu_times()
            seconds[process] = times.user + times.system
    return seconds


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


logger = logging.getLogger(__name__)

ALARM, LIMIT = "alarm/", "_limit"
# In optimizer steps: 3 show a sudden jump, 5 halve the noise of a share, 20 define what is usual.
FEW, WINDOW, LONG = 3, 5, 20

Values = Sequence[float]  # one metric at the optimizer steps that have it


class AlarmStop(RuntimeError):
    """Error that ends a run because of an alarm whose setting is `stop`; its commits stay valid."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A measure of a run, its limit, and the advice if the limit is broken."""

    limit: str  # name of the limit in the alarm's section of `alarms`
    at_least: bool  # True: the limit is a minimum; False: a maximum
    metrics: tuple[str, ...]  # the first one that a step has is used
    measure: Callable[[Values], float | None]  # None: too few steps
    what: str  # the measure, in words
    advice: str

    def metric_of(self, point: Point) -> str:
        """Return the name of the metric that is used; empty if the point has none of them."""
        return next((name for name in self.metrics if name in point.metrics), "")

    def is_broken(self, value: float, limit: float) -> bool:
        return value < limit if self.at_least else value > limit


@dataclass(frozen=True, slots=True)
class Alarm:
    """One limit broken at one optimizer step."""

    name: str
    metric: str
    value: float  # of the rule's measure
    limit: float
    step: int

    def __str__(self) -> str:
        rule = RULES[self.name]
        broken = "below" if rule.at_least else "above"
        return (
            f"alarm {self.name} at optimizer step {self.step}: {self.metric}, {rule.what}, is"
            f" {self.value:.3g}, {broken} alarms.{self.name}.{rule.limit} {self.limit:g};"
            f" {rule.advice}"
        )


def tripped(alarms: AlarmsConfig, history: Sequence[Point]) -> list[Alarm]:
    """Return an alarm for each limit broken at a history's last point, except for rules set to
    `off`. history: the run's points in order, not empty.
    """
    alarms_raised = []
    for name, rule in RULES.items():
        alarm = getattr(alarms, name)
        if alarm.action != "off":
            limit = float(getattr(alarm, rule.limit))
            metric, value = measured(rule, history)
            if value is not None and rule.is_broken(value, limit):
                alarms_raised.append(Alarm(name, metric, value, limit, history[-1].step))
    return alarms_raised


def measured(rule: Rule, history: Sequence[Point]) -> tuple[str, float | None]:
    """Return (name of the metric, the rule's measure at the last point). history: not empty.
    The name is empty if the point has no such metric; the measure is None if it is not defined.
    """
    metric = rule.metric_of(history[-1])
    values = [point.metrics[metric] for point in history if metric in point.metrics]
    return metric, rule.measure(values) if metric else None


def raised(points: Iterable[Point]) -> Iterator[tuple[Alarm, bool]]:
    """Yield (alarm, whether a trouble begins with it) for the alarms stored in these points.

    A trouble is a series of one rule's alarms. A pause of fewer than WINDOW points does not end it.
    """
    last: dict[str, int] = {}
    for index, point in enumerate(points):
        for name, rule in RULES.items():
            if f"{ALARM}{name}" in point.metrics:
                metric = rule.metric_of(point)
                value, limit = (point.metrics[f"{ALARM}{name}{part}"] for part in ("", LIMIT))
                begins = index - last.get(name, -WINDOW - 1) > WINDOW
                yield Alarm(name, metric, value, limit, point.step), begins
                last[name] = index


def with_flat_limits(text: str) -> str:
    """Return the text of an alarm with its limit's name in earlier versions: alarms.min_entropy."""
    return re.sub(r"alarms\.(\w+)\.(min|max)", r"alarms.\2_\1", text)


def begun(points: Iterable[Point]) -> list[Alarm]:
    """Return the alarms at which a trouble begins; see `raised`."""
    return [alarm for alarm, begins in raised(points) if begins]


class Watch:
    """Detector of alarms in a run's training, which takes one point after the other."""

    def __init__(self, alarms: AlarmsConfig, history: Iterable[Point]) -> None:
        """Watch a run's training. history: the points committed before."""
        self._alarms, self._points = alarms, list(history)

    def take(self, point: Point) -> Point:
        """Return the point with its alarms and progress added to its metrics, and remember it.

        An alarm that begins a trouble is logged as a warning if its setting is `warn`.
        """
        point = replace(point, metrics={**point.metrics, **progressed(self._points, point)})
        alarms = tripped(self._alarms, [*self._points, point])
        marks = {}
        for alarm in alarms:
            marks[f"{ALARM}{alarm.name}"] = alarm.value
            marks[f"{ALARM}{alarm.name}{LIMIT}"] = alarm.limit
        self._points.append(replace(point, metrics={**point.metrics, **marks}))
        for alarm, begins in raised(self._points[-WINDOW - 1 :]):
            if begins and alarm in alarms and getattr(self._alarms, alarm.name).action == "warn":
                logger.warning("%s", alarm)
        return self._points[-1]

    @property
    def stop(self) -> AlarmStop | None:
        """Error to raise if the last point breaks a limit whose setting is `stop`; else None."""
        for alarm in tripped(self._alarms, self._points) if self._points else ():
            if getattr(self._alarms, alarm.name).action == "stop":
                action, limit = f"{alarm.name}.action", f"{alarm.name}.{RULES[alarm.name].limit}"
                return AlarmStop(
                    f"{alarm}. Nothing committed is lost: with alarms.{action} warn, or another"
                    f" alarms.{limit}, the same command continues from there"
                )
        return None


def _mean(values: Values, count: int) -> float | None:
    return fmean(values[-count:]) if len(values) >= count else None


def _median(values: Values, least: int) -> float | None:
    return median(values) if len(values) >= least else None


def _times_usual(values: Values) -> float | None:
    usual, now = _median(values[:-FEW][-LONG:], WINDOW), _mean(values, FEW)
    return now / usual if usual and now is not None else None


def _share_of_usual(values: Values) -> float | None:
    usual, now = _median(values, 2 * LONG), _median(values[-LONG:], LONG)
    return now / usual if usual and now is not None else None


def _below_best(values: Values) -> float | None:
    """Return the best mean of a window so far, minus the last mean; None for too few steps."""
    means = [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    return max(means) - means[-1] if means else None


RULES = {
    "entropy": Rule(
        "min",
        True,
        ("rollout/entropy",),
        partial(_mean, count=FEW),
        f"mean of {FEW} steps",
        "the policy has nearly stopped exploring: raise algorithm.clip_high or"
        " algorithm.entropy_coef, or lower optimizer.lr",
    ),
    "gradient": Rule(
        "max_factor",
        False,
        ("actor/grad_norm", "sft/grad_norm", "dpo/grad_norm"),
        _times_usual,
        f"mean of {FEW} steps over the median of the {LONG} before",
        "lower optimizer.lr or optimizer.grad_clip, and look at these steps' episodes",
    ),
    "update_kl": Rule(
        "max",
        False,
        ("actor/update_kl", "actor/ratio_kl"),
        partial(_mean, count=FEW),
        f"mean of {FEW} steps",
        "one update moves the policy too far: lower optimizer.lr, algorithm.epochs or"
        " algorithm.minibatches",
    ),
    "zero_variance": Rule(
        "max_frac",
        False,
        ("rollout/equal_reward_groups_frac",),
        partial(_mean, count=LONG),
        f"mean of {LONG} steps",
        "nearly no group teaches anything: take easier or harder items, a larger"
        " rollout.group_size, or recipe dapo, which replaces such groups",
    ),
    "success": Rule(
        "max_drop",
        False,
        ("rollout/success",),
        _below_best,
        f"best mean of {WINDOW} steps minus the last",
        "the policy gets worse: lower optimizer.lr, hold it with algorithm.kl_coef, and look at"
        " rollout/truncated_frac and rollout/env_error_frac; store.keep_best keeps its best"
        " weights",
    ),
    "mismatch": Rule(
        "max_kl",
        False,
        ("mismatch/kl",),
        partial(_mean, count=WINDOW),
        f"mean of {WINDOW} steps",
        "engine and learner drift apart: lower rollout.max_staleness, or set rollout.engine_dtype"
        " to what the learner's weights are",
    ),
    "throughput": Rule(
        "min_frac",
        True,
        ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s"),
        _share_of_usual,
        f"median of {LONG} steps over that of the whole run",
        "look at time/* of these steps for the part that grew, at other programs on the machine,"
        " and at the environment servers",
    ),
}
