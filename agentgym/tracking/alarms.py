"""Is a training run in trouble: a pure function of its committed metrics, so that whoever reads
them again finds the same alarms.

Each rule compares one measure with its limit. A measure is taken over several optimizer steps: one
noisy step is no trouble. Where a limit is broken, both stand among the
step's metrics, as `alarm/NAME` and `alarm/NAME_limit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from agentgym.config import AlarmsConfig
from agentgym.tracking.points import Point
from agentgym.tracking.progress import progressed

logger = logging.getLogger(__name__)

PREFIX, LIMIT = "alarm/", "_limit"
# Optimizer steps. Over 3 a jump shows that was made at once, over 5 the noise of a share is halved,
# 20 are what is usual.
FEW, WINDOW, LONG = 3, 5, 20

Values = Sequence[float]  # of one metric, at the optimizer steps that have it


class AlarmStop(RuntimeError):
    """A run in trouble ended itself after a commit, as its configuration asks."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is measured of a run, and what is said where that breaks its limit."""

    limit: str  # the setting of `alarms` that holds it
    at_least: bool  # the limit is the least allowed, else the most
    metrics: tuple[str, ...]  # the first one counts that a step has
    measure: Callable[[Values], float | None]  # None: too few steps to tell
    what: str  # the measure, for people
    advice: str

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
            f" {self.value:.3g}, {broken} alarms.{rule.limit} {self.limit:g}; {rule.advice}"
        )


def tripped(alarms: AlarmsConfig, history: Sequence[Point]) -> list[Alarm]:
    """The limits that are broken at the last of these points, by rules that are not off.
    history: all points of the run's training so far, in order.
    """
    found = []
    for name, rule in RULES.items():
        if getattr(alarms, name) != "off":
            limit = float(getattr(alarms, rule.limit))
            metric, value = measured(rule, history)
            if value is not None and rule.is_broken(value, limit):
                found.append(Alarm(name, metric, value, limit, history[-1].step))
    return found


def measured(rule: Rule, history: Sequence[Point]) -> tuple[str, float | None]:
    """(metric, the rule's measure at the last of these points); None where that cannot be told."""
    metric = next((name for name in rule.metrics if name in history[-1].metrics), "")
    values = [each.metrics[metric] for each in history if metric in each.metrics]
    return metric, rule.measure(values) if metric else None


def raised(points: Iterable[Point]) -> Iterator[tuple[Alarm, bool]]:
    """(alarm, whether its trouble begins there), as these points were marked.
    What had passed for less than a window goes on.
    """
    last: dict[str, int] = {}
    for index, point in enumerate(points):
        for name, rule in RULES.items():
            if f"{PREFIX}{name}" in point.metrics:
                metric = next((each for each in rule.metrics if each in point.metrics), "")
                value, limit = (point.metrics[f"{PREFIX}{name}{part}"] for part in ("", LIMIT))
                begins = index - last.get(name, -WINDOW - 1) > WINDOW
                yield Alarm(name, metric, value, limit, point.step), begins
                last[name] = index


def begun(points: Iterable[Point]) -> list[Alarm]:
    """Each trouble once, where it began."""
    return [alarm for alarm, begins in raised(points) if begins]


class Watch:
    """Follows a run's training point by point."""

    def __init__(self, alarms: AlarmsConfig, history: Iterable[Point]) -> None:
        """history: what was committed before."""
        self._alarms, self._points = alarms, list(history)

    def take(self, point: Point) -> Point:
        """The point with its alarms and what training has cost among its metrics; where trouble
        begins, a warning says so.
        """
        point = replace(point, metrics={**point.metrics, **progressed(self._points, point)})
        found = tripped(self._alarms, [*self._points, point])
        marks = {
            name: value
            for each in found
            for name, value in (
                (f"{PREFIX}{each.name}", each.value),
                (f"{PREFIX}{each.name}{LIMIT}", each.limit),
            )
        }
        self._points.append(replace(point, metrics={**point.metrics, **marks}))
        for alarm, begins in raised(self._points[-WINDOW - 1 :]):
            if begins and alarm in found and getattr(self._alarms, alarm.name) == "warn":
                logger.warning("%s", alarm)
        return self._points[-1]

    @property
    def stop(self) -> AlarmStop | None:
        """What ends the run now: the last point breaks a limit that is to do so."""
        for alarm in tripped(self._alarms, self._points) if self._points else ():
            if getattr(self._alarms, alarm.name) == "stop":
                return AlarmStop(
                    f"{alarm}. Nothing committed is lost: with alarms.{alarm.name} warn, or another"
                    f" alarms.{RULES[alarm.name].limit}, the same command goes on from there"
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
    """The best mean of a window so far, minus the last one."""
    means = [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    return max(means) - means[-1] if means else None


RULES = {
    "entropy": Rule(
        "min_entropy",
        True,
        ("rollout/entropy",),
        partial(_mean, count=FEW),
        f"mean of {FEW} steps",
        "the policy has nearly stopped exploring: raise algorithm.clip_high or"
        " algorithm.entropy_coef, or lower optimizer.lr",
    ),
    "gradient": Rule(
        "max_gradient_factor",
        False,
        ("actor/grad_norm", "sft/grad_norm", "dpo/grad_norm"),
        _times_usual,
        f"mean of {FEW} steps over the median of the {LONG} before",
        "lower optimizer.lr or optimizer.grad_clip, and look at these steps' episodes",
    ),
    "update_kl": Rule(
        "max_update_kl",
        False,
        ("actor/update_kl", "actor/ratio_kl"),
        partial(_mean, count=FEW),
        f"mean of {FEW} steps",
        "one update moves the policy too far: lower optimizer.lr, algorithm.epochs or"
        " algorithm.minibatches",
    ),
    "zero_variance": Rule(
        "max_zero_variance_frac",
        False,
        ("rollout/equal_reward_groups_frac",),
        partial(_mean, count=LONG),
        f"mean of {LONG} steps",
        "nearly no group teaches anything: take easier or harder items, a larger"
        " rollout.group_size, or recipe dapo, which replaces such groups",
    ),
    "success": Rule(
        "max_success_drop",
        False,
        ("rollout/success",),
        _below_best,
        f"best mean of {WINDOW} steps minus the last",
        "the policy gets worse: lower optimizer.lr, hold it with algorithm.kl_coef, and look at"
        " rollout/truncated_frac and rollout/env_error_frac; store.keep_best keeps its best"
        " weights",
    ),
    "mismatch": Rule(
        "max_mismatch_kl",
        False,
        ("mismatch/kl",),
        partial(_mean, count=WINDOW),
        f"mean of {WINDOW} steps",
        "engine and learner drift apart: lower rollout.max_staleness, or set rollout.engine_dtype"
        " to what the learner's weights are",
    ),
    "throughput": Rule(
        "min_throughput_frac",
        True,
        ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s"),
        _share_of_usual,
        f"median of {LONG} steps over that of the whole run",
        "look at time/* of these steps for the part that grew, at other programs on the machine,"
        " and at the environment servers",
    ),
}
