"""Where weights are trained and episodes played: in this process or in Ray actors.
Who uses them cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from safetensors.torch import load as load_safetensors
from torch import Tensor

import agentgym.training.engine as inline
from agentgym.algorithms.batch import Batch
from agentgym.config import AlgorithmConfig, OptimiserConfig, RunConfig
from agentgym.rollouts.client import Endpoints
from agentgym.training.checkpoint import Checkpoint
from agentgym.training.learner import Learner
from agentgym.training.model import load_weights, model_from_blobs
from agentgym.training.networks import ValueNet
from agentgym.training.ranks import ProcessGroup
from agentgym.types import Item, Trajectory


class AnyLearner(Protocol):
    """What a training loop asks of `Learner`, wherever its weights are."""

    def score(self, batch: Batch) -> Tensor: ...
    def update(
        self, batch: Batch, config: AlgorithmConfig, *, step: int, seed: int
    ) -> dict[str, float]: ...
    def sft_step(self, batch: Batch, *, step: int) -> dict[str, float]: ...
    def dpo_step(
        self, batch: Batch, reference: Tensor, *, beta: float, label_smoothing: float, step: int
    ) -> dict[str, float]: ...
    def blobs(self) -> dict[str, bytes]: ...


class AnyEngine(Protocol):
    """What a training loop asks of `Engine`, wherever its episodes are played."""

    def collect(
        self,
        items: Sequence[Item],
        *,
        num_samples: int,
        step: int,
        max_turns: int,
        temperature: float,
        seed: int,
        first_sample: int = 0,
        read_last: bool = False,
        progress: Callable[[int], None] = ...,
    ) -> list[Trajectory]: ...
    def publish(self, learner: Any, version: int) -> float:
        """learner: of the same `open_compute`."""
        ...


@dataclass(frozen=True)
class LearnerPlan:
    """All that a learner begins with, as bytes that travel to the process it is built in."""

    architecture: str  # config.json
    weights: bytes
    optimiser: OptimiserConfig
    total_steps: int
    critic: bytes | None = None  # weights; empty: a new one on the policy's body
    critic_lr: float | None = None
    reference: bytes | None = None  # weights
    # by blob name; empty: new ones
    optimiser_states: Mapping[str, bytes] = field(default_factory=dict)

    def build(self, ranks: ProcessGroup | None = None) -> Learner:
        """The learner, or this rank's part of it."""
        model = model_from_blobs(self.architecture, self.weights)
        critic = None
        if self.critic is not None:
            critic = ValueNet(model_from_blobs(self.architecture, self.weights))
            if self.critic:
                load_weights(critic, load_safetensors(self.critic))
        reference = (
            None if self.reference is None else model_from_blobs(self.architecture, self.reference)
        )
        learner = Learner(
            model,
            self.optimiser,
            total_steps=self.total_steps,
            ranks=ranks,
            critic=critic,
            critic_lr=self.critic_lr,
            reference=reference,
        )
        if self.optimiser_states:
            learner.load_optimisers(self.optimiser_states)
        return learner


@contextmanager
def open_compute(
    cfg: RunConfig, plan: LearnerPlan, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[tuple[AnyLearner, AnyEngine]]:
    """A learner, and an engine that holds the checkpoint's weights as `version`.
    Errors: see `open_engine`, `open_cluster`.
    """
    if cfg.compute == "ray":
        from agentgym.training.cluster import open_cluster

        with (
            open_cluster(
                cfg, num_ranks=cfg.ray.num_ranks, num_workers=cfg.ray.num_workers
            ) as cluster,
            cluster.learner(plan) as learner,
            cluster.engine(checkpoint, endpoints, version=version) as engine,
        ):
            yield learner, engine
    else:
        own = plan.build()
        del plan  # with a second copy of the weights
        with inline.open_engine(cfg, checkpoint, endpoints, version=version) as single:
            yield own, single


@contextmanager
def open_learner(cfg: RunConfig, plan: LearnerPlan) -> Iterator[AnyLearner]:
    """A learner alone. Errors: see `open_cluster`."""
    if cfg.compute == "ray":
        from agentgym.training.cluster import open_cluster

        with (
            open_cluster(cfg, num_ranks=cfg.ray.num_ranks, num_workers=0) as cluster,
            cluster.learner(plan) as learner,
        ):
            yield learner
    else:
        yield plan.build()


@contextmanager
def open_engine(
    cfg: RunConfig, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[AnyEngine]:
    """An engine alone. Errors: where a server is not what training may use; see `open_cluster`."""
    if cfg.compute == "ray":
        from agentgym.training.cluster import open_cluster

        with (
            open_cluster(cfg, num_ranks=0, num_workers=cfg.ray.num_workers) as cluster,
            cluster.engine(checkpoint, endpoints, version=version) as engine,
        ):
            yield engine
    else:
        with inline.open_engine(cfg, checkpoint, endpoints, version=version) as own:
            yield own


def play_validation(
    cfg: RunConfig, engine: AnyEngine, items: Sequence[Item], step: int
) -> list[Trajectory]:
    """One episode of each validation item under the weights the engine holds; never learned
    from.
    """
    settings = cfg.validation
    return engine.collect(
        items[: settings.num_items],
        num_samples=1,
        step=step,
        max_turns=settings.max_turns,
        temperature=settings.temperature,
        seed=cfg.seed,
    )
