"""A step of a run and the outcome of running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from agentgym.rollouts.horizon import Stage
from agentgym.store.manifest import Manifest

if TYPE_CHECKING:
    from agentgym.steps.context import StepContext


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
    run: Callable[[StepContext], Manifest]
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
        built_on = (
            self.data,
            self.checkpoint,
            self.start,
            self.demonstrations,
            self.baseline,
            self.evaluation,
            *self.told,
            self.registration,
        )
        return tuple(dict.fromkeys(filter(None, built_on)))


@dataclass(frozen=True)
class Outcome:
    """Result of `run_step`."""

    step: Step
    manifest: Manifest
    how: Literal["done", "resumed", "ran"]
    resumed_at: int | None = None  # number of earlier commits

    def __str__(self) -> str:
        return f"resumed at commit {self.resumed_at}" if self.how == "resumed" else self.how
