"""A step of a run and the outcome of running it; the curriculum of ScalingInter, whose stages are
steps and which sets the maximum number of turns at each optimizer step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from statistics import fmean
from typing import Any, Literal

from agentgym.config import HorizonConfig
from agentgym.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of optimizer steps with one horizon."""

    index: int  # from 1
    max_turns: int  # the largest, if it grows within the stage
    first_step: int  # inclusive, from 1
    last_step: int  # inclusive

    @property
    def name(self) -> str:
        return f"stage-{self.index}"

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def stages(config: HorizonConfig) -> tuple[Stage, ...]:
    """Return the stages in order; together they cover every optimizer step once."""
    ends = list(accumulate(config.stage_steps))
    if config.kind == "adaptive":
        return (Stage(1, config.max_turns[-1], 1, ends[-1]),)
    return tuple(
        Stage(index + 1, turns, end - steps + 1, end)
        for index, (turns, steps, end) in enumerate(
            zip(config.max_turns, config.stage_steps, ends, strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class HorizonState:
    """State of an adaptive horizon: the limit on turns grows once success stops growing. Every
    commit of reinforcement learning contains it; see `horizon_state` for commits without one.
    """

    level: int = 0  # index into max_turns
    recent: tuple[float, ...] = ()  # success of the optimizer steps at this level, newest last


def max_turns(config: HorizonConfig, step: int, state: HorizonState = HorizonState()) -> int:
    """Return the horizon at optimizer step 1, 2, ...

    It is a pure function of step and recorded state, so that a resumed run cannot shift it.
    The last stage's horizon applies to all later steps. Errors: ValueError for a step below 1.
    Source: ScalingInter-RL, arXiv:2509.08755; adaptive is ours.
    """
    if step < 1:
        raise ValueError(f"optimizer steps count from 1, got {step}")
    if config.kind == "adaptive":
        return config.max_turns[state.level]
    ends = list(accumulate(config.stage_steps))
    return config.max_turns[min(bisect_right(ends, step - 1), len(ends) - 1)]


def advance(config: HorizonConfig, state: HorizonState, success: float) -> HorizonState:
    """Return the state after a step with this share of successes: an adaptive horizon grows once
    success stops growing.

    The mean success of the last `window` steps is compared with that of the `window` steps before,
    all at the present level.
    """
    if config.kind != "adaptive":
        return state
    recent = (*state.recent, success)[-2 * config.window :]
    stalled = (
        len(recent) == 2 * config.window
        and fmean(recent[config.window :]) - fmean(recent[: config.window]) < config.min_gain
    )
    if stalled and state.level + 1 < len(config.max_turns):
        return HorizonState(state.level + 1)
    return HorizonState(state.level, recent)


class Kind(StrEnum):
    """Kind of work that a step does."""

    PREPARE = "prepare"  # the items
    DEMONSTRATE = "demonstrate"  # the episodes that training imitates
    INITIALIZE = "initialize"  # the model before any training
    TRAIN = "train"  # a stage of the curriculum, or the warm start before it
    EVALUATE = "evaluate"
    REGISTER = "register"
    REPORT = "report"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One resumable unit of work. Fields for its inputs are names of other steps; empty: none."""

    name: str
    title: str
    kind: Kind
    run: Callable[[Any], Manifest]  # takes a `StepContext`, whose module imports this one
    sections: tuple[str, ...]  # of the configuration that change its result
    modules: tuple[str, ...]  # whose source computes it
    data: str = ""  # the items
    checkpoint: str = ""  # the weights that it trains further, plays or registers
    start: str = ""  # the weights that a KL penalty or self-training refers to
    demonstrations: str = ""
    baseline: str = ""  # the evaluation that this one is paired with
    evaluation: str = ""  # of the checkpoint that is registered
    told: tuple[str, ...] = ()  # steps in a report, in its order
    registration: str = ""
    stage: Stage | None = None  # of the curriculum
    is_continued: bool = False  # a later step continues with its optimizer's state
    headline: bool = False  # its metrics also show on the parent run in MLflow

    @property
    def parents(self) -> tuple[str, ...]:
        """Names of all steps that it builds on, each once."""
        built_on = [self.data, self.checkpoint, self.start, self.demonstrations, self.baseline]
        built_on += [self.evaluation, *self.told, self.registration]
        return tuple(dict.fromkeys(filter(None, built_on)))


@dataclass(frozen=True)
class Outcome:
    """Result of `run_step`: a step, its final manifest, and how it was reached."""

    step: Step
    manifest: Manifest
    how: Literal["done", "resumed", "ran"]
    resumed_at: int | None = None  # number of earlier commits

    def __str__(self) -> str:
        return f"resumed at commit {self.resumed_at}" if self.how == "resumed" else self.how
