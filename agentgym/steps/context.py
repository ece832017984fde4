"""What a running step sees: its parameters, its parents, and the one way to make progress
durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentgym.config import RunConfig
from agentgym.records import TRAJECTORIES, encode_trajectories
from agentgym.steps.step import Step
from agentgym.store.manifest import Blob, Manifest
from agentgym.store.runstore import RunStore, StepWriter
from agentgym.tracking.points import Point, encode_points
from agentgym.types import Endpoints, Trajectory

# offer_expert -> endpoints of running servers
Environment = Callable[[bool], AbstractContextManager[Endpoints]]

METRICS = "metrics.jsonl"
OUTCOMES = "outcomes.json"  # of an evaluation


class Progress(Protocol):
    """Where a step shows how far it is: a progress bar, an artifact, nothing."""

    def start(self, what: str, total: int) -> None:
        """A part of `total` units begins; an earlier part is over."""
        ...

    def advance(self, count: int = 1, note: str = "") -> None: ...


class NoProgress:
    """Shows nothing."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self, count: int = 1, note: str = "") -> None: ...


@dataclass
class StepContext:
    """One open step. It alone may commit, under the lease its writer holds."""

    cfg: RunConfig
    step: Step
    config: dict[str, Any]  # the semantic fields in the step's key
    store: RunStore
    writer: StepWriter
    parents: dict[str, Manifest]
    environment: Environment
    progress: Progress = field(default_factory=NoProgress)
    on_commit: Callable[[Manifest], None] = lambda _: None
    _opened_at: float = field(default_factory=time.perf_counter)

    @property
    def data(self) -> Manifest:
        """What prepared the items."""
        return self.parents[self.step.data]

    @property
    def checkpoint(self) -> Manifest:
        """The weights this step goes on with, plays or registers."""
        return self.parents[self.step.checkpoint]

    @property
    def start(self) -> Manifest:
        """The weights that a penalty or self-training goes back to."""
        return self.parents[self.step.start]

    @property
    def demonstrations(self) -> Manifest:
        return self.parents[self.step.demonstrations]

    @property
    def head(self) -> Manifest | None:
        """The last commit of this step: what a resumed run goes on from."""
        return self.writer.head

    def read(self, manifest: Manifest, name: str) -> bytes:
        """Verified content. Errors: DigestMismatch, BlobMissing."""
        return self.store.read(manifest, name)

    def commit(
        self,
        *,
        done: bool,
        state: dict[str, Any],
        blobs: dict[str, bytes | Blob],
        results: dict[str, Any] | None = None,
        points: Sequence[Point] = (),
        trajectories: Sequence[Trajectory] = (),
        records: Mapping[str, bytes] | None = None,
    ) -> Manifest:
        """Weights first, manifest last, MLflow after that: a kill between any two loses nothing
        and repeats nothing.

        blobs: content that another run of the same step would make to the bit; records: what tells
        of clocks.
        """
        earlier = self.writer.head.timings.get("wall_s", 0.0) if self.writer.head else 0.0
        now = time.perf_counter()
        manifest = self.writer.commit(
            done=done,
            state=state,
            parents={name: parent.digest for name, parent in self.parents.items()},
            config=self.config,
            blobs=blobs,
            records={
                **({METRICS: encode_points(points)} if points else {}),
                **({TRAJECTORIES: encode_trajectories(trajectories)} if trajectories else {}),
                **(records or {}),
            },
            results=results or {},
            timings={"wall_s": earlier + now - self._opened_at},
        )
        self._opened_at = now
        self.on_commit(manifest)
        self.writer.prune(1 if done else self.cfg.store.keep_checkpoints)
        return manifest


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow stamps its points."""
    return time.time_ns() // 1_000_000
