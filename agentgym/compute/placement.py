"""Training of weights and playing of episodes, in this process or in Ray actors.
Callers need not know which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

import agentgym.rollouts.engine as inline
from agentgym.algorithms.batch import Batch, Experience
from agentgym.config import ConfigError, PolicyGradientConfig, RunConfig
from agentgym.learner.process_group import SingleProcess
from agentgym.learner.start import LearnerPlan
from agentgym.models.checkpoint import Checkpoint
from agentgym.rollouts.engine import RolloutRequest
from agentgym.rollouts.policies.engines import why_merged
from agentgym.store.runstore import Writable
from agentgym.types import Endpoints, EngineUsage, Item, Trajectory

logger = logging.getLogger(__name__)


class Learner(Protocol):
    """Protocol of a learner: it updates weights, wherever they are."""

    def peak_tflops(self, of_device: float | None) -> float | None:
        """Return the peak of all ranks' devices, TFLOP/s; None if unknown.
        of_device: peak of one device; None: the known one for the device's name.
        """
        ...

    def score(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities under the current weights; 0 where action_mask is false."""
        ...

    def score_reference(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities under the plan's reference; 0 where action_mask is false."""
        ...

    def drop_reference(self) -> None:
        """Free the memory of the reference."""
        ...

    def prepare(self, batch: Batch, config: PolicyGradientConfig, *, step: int) -> Experience:
        """Return a batch's experience before the update, without advantages."""
        ...

    def update(
        self, experience: Experience, config: PolicyGradientConfig, *, step: int, seed: int
    ) -> tuple[Experience, dict[str, float]]:
        """Take one training step on an experience with advantages. Result: the experience with
        log-probabilities, and metrics by name.
        """
        ...

    def sft_step(self, batch: Batch, *, step: int) -> dict[str, float]: ...
    def dpo_step(
        self, batch: Batch, reference: Tensor, *, beta: float, label_smoothing: float, step: int
    ) -> dict[str, float]: ...
    def snapshot(self, with_optimizer: bool = True) -> Writable:
        """Copy the trained networks; with the optimizer's state, the copy is all that another
        learner needs to resume from here.
        """
        ...


class Engine(Protocol):
    """Protocol of an engine: it plays episodes, wherever that is."""

    def collect(
        self, request: RolloutRequest, progress: Callable[[int], None] = ...
    ) -> list[Trajectory]: ...
    def publish(self, learner: Any, version: int) -> float:
        """Hand the learner's weights to the engine as `version` and prove that they arrived.
        learner: of the same `open_compute`. Result: the canary's difference, nats.
        """
        ...

    def usage(self) -> EngineUsage:
        """Return the usage, see `Policy.usage`; the sum over several engines."""
        ...


def num_accelerators(cfg: RunConfig) -> float:
    """Return the number of GPUs that a training uses, including its engines; 0 on a CPU."""
    if cfg.compute_device == "cpu":
        return 0.0
    ray = cfg.ray
    num_gpus = ray.num_ranks * ray.rank_gpus + ray.num_workers * ray.worker_gpus
    return num_gpus if cfg.compute == "ray" else 1.0


@contextmanager
def open_compute(
    cfg: RunConfig, plan: LearnerPlan, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[tuple[Learner, Engine]]:
    """Yield a learner, and an engine that holds the checkpoint's weights as `version`.
    Errors: as `open_engine` of `agentgym.rollouts.engine` or `open_cluster`; ConfigError if the
    plan leaves `lora` out.
    """
    if cfg.lora.rank and plan.adapter is None:
        raise ConfigError(
            f"lora.rank {cfg.lora.rank} with recipe {cfg.algorithm.recipe}, whose training loop"
            " trains no adapter; use lora.rank 0, or give its LearnerPlan ctx.adapter(start)"
        )
    if plan.adapter is not None:
        reason = why_merged(cfg, plan.adapter, checkpoint.architecture)
        logger.info("publishes %s", f"merged weights: {reason}" if reason else "the adapter alone")
        adapter = replace(plan.adapter, alone=not reason)
        plan = replace(plan, adapter=adapter)
        checkpoint = replace(checkpoint, adapter=adapter if adapter.alone else None)
    if cfg.compute == "ray":
        from agentgym.compute.cluster import open_cluster

        with (
            open_cluster(
                cfg, num_ranks=cfg.ray.num_ranks, num_workers=cfg.ray.num_workers
            ) as cluster,
            cluster.learner(plan) as learner,
            cluster.engine(checkpoint, endpoints, version=version) as engine,
        ):
            yield learner, engine
    else:
        single_learner = plan.build(SingleProcess(cfg.compute_device))
        with inline.open_engine(cfg, checkpoint, endpoints, version=version) as single_engine:
            yield single_learner, single_engine


@contextmanager
def open_learner(cfg: RunConfig, plan: LearnerPlan) -> Iterator[Learner]:
    """Yield a learner alone. Errors: see `open_cluster`."""
    if cfg.compute == "ray":
        from agentgym.compute.cluster import open_cluster

        with (
            open_cluster(cfg, num_ranks=cfg.ray.num_ranks, num_workers=0) as cluster,
            cluster.learner(plan) as learner,
        ):
            yield learner
    else:
        yield plan.build(SingleProcess(cfg.compute_device))


def play_validation(
    cfg: RunConfig, engine: Engine, items: Sequence[Item], step: int
) -> list[Trajectory]:
    """Play one episode of each of the first `validation.num_items` items; do not train on them."""
    settings = cfg.validation
    request = RolloutRequest(
        items[: settings.num_items],
        num_samples=1,
        step=step,
        max_turns=settings.max_turns,
        temperature=settings.temperature,
        seed=cfg.seed,
    )
    return engine.collect(request)
