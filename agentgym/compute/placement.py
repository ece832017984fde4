"""Training of weights and playing of episodes, in this process or in Ray actors.
Callers need not know which.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import agentgym.rollouts.engine as inline
from agentgym.compute.learner_ranks import RayLearner
from agentgym.config import ConfigError, RunConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.learner.start import LearnerPlan
from agentgym.models.checkpoint import Checkpoint
from agentgym.rollouts.engine import RolloutRequest
from agentgym.rollouts.policies.engines import why_merged
from agentgym.types import Endpoints, Item, Trajectory

if TYPE_CHECKING:
    from agentgym.compute.rollout_workers import RayEngine

logger = logging.getLogger(__name__)

Learner = LocalLearner | RayLearner
Engine: TypeAlias = "inline.LocalEngine | RayEngine"


def num_accelerators(cfg: RunConfig) -> float:
    """Return the number of GPUs that a training uses, including its engines: 0 on a CPU, with
    `compute` ray those of all ranks and workers, else 1.
    """
    if cfg.compute_device == "cpu":
        return 0.0
    ray = cfg.ray
    num_gpus = ray.num_ranks * ray.rank_gpus + ray.num_workers * ray.worker_gpus
    return num_gpus if cfg.compute == "ray" else 1.0


@contextmanager
def open_compute(
    cfg: RunConfig, plan: LearnerPlan, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[tuple[Learner, Engine]]:
    """Yield a learner and an engine, in Ray actors with `compute` ray, else in this process.
    plan: builds the learner. checkpoint: the engine's first weights. version: their number.
    An engine in this process may take over the checkpoint's model, not copied.
    Errors: those of `open_engine` of `agentgym.rollouts.engine`, or of `open_cluster` and
    `Cluster`; ConfigError if `lora.rank` is set and the plan has no adapter.
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
        single_learner = plan.build(ProcessGroup(cfg.compute_device))
        with inline.open_engine(cfg, checkpoint, endpoints, version=version) as single_engine:
            yield single_learner, single_engine


@contextmanager
def open_learner(cfg: RunConfig, plan: LearnerPlan) -> Iterator[Learner]:
    """Yield the plan's learner without an engine, in Ray actors with `compute` ray, else in this
    process. Errors with ray: those of `open_cluster` and `Cluster.learner`.
    """
    if cfg.compute == "ray":
        from agentgym.compute.cluster import open_cluster

        with (
            open_cluster(cfg, num_ranks=cfg.ray.num_ranks, num_workers=0) as cluster,
            cluster.learner(plan) as learner,
        ):
            yield learner
    else:
        yield plan.build(ProcessGroup(cfg.compute_device))


def play_validation(
    cfg: RunConfig, engine: Engine, items: Sequence[Item], step: int
) -> list[Trajectory]:
    """Play each of the first `validation.num_items` items once; return trajectories in order.
    step: of the random numbers. Errors: those of the engine's `collect`.
    """
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
