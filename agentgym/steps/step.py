"""One step, and what came of running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentgym.steps.context import StepContext
from agentgym.store.manifest import Manifest


@dataclass(frozen=True)
class Step:
    """One resumable unit of work."""

    name: str
    title: str
    parents: tuple[str, ...]
    sections: tuple[str, ...]  # of the configuration that change its result
    modules: tuple[str, ...]  # whose source computes it
    run: Callable[[StepContext], Manifest]
    headline: bool = False  # its metrics also show on the parent run in MLflow


@dataclass(frozen=True)
class Outcome:
    """What `run_step` found or did."""

    step: Step
    manifest: Manifest
    how: Literal["done", "resumed", "ran"]
    resumed_at: int | None = None  # commits that were there already

    def __str__(self) -> str:
        return f"resumed at commit {self.resumed_at}" if self.how == "resumed" else self.how
