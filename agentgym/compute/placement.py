"""Where weights are trained and episodes played: in this process or in Ray actors.
Who uses them cannot tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

import agentgym.rollouts.engine as inline
from agentgym.algorithms.batch import Batch
from agentgym.algorithms.experience import Experience
from agentgym.config import ConfigError, PolicyGradientConfig, RunConfig
from agentgym.learner.plan import LearnerPlan
from agentgym.learner.process_group import SingleProcess
from agentgym.models.checkpoint import Checkpoint
from agentgym.rollouts.policies.engines import why_merged
from agentgym.store.place import Writable
from agentgym.types import Endpoints, EngineUsage, Item, Trajectory

logger = logging.getLogger(__name__)


class Learner(Protocol):
    """What updates weights, wherever they are."""

    def peak_tflops(self, of_device: float | None) -> float | None:
        """Of all ranks' devices. of_device: of one; None: as its name tells, if that is known."""
        ...

    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the present weights; 0 where action_mask is false."""
        ...

    def score_reference(self, batch: Batch) -> Tensor:
        """The same under the plan's reference."""
        ...

    def drop_reference(self) -> None:
        """Give its memory back."""
        ...

    def prepare(self, batch: Batch, config: PolicyGradientConfig, *, step: int) -> Experience:
        """What is known of a batch before the update; advantages are not among it."""
        ...

    def update(
        self, experience: Experience, config: PolicyGradientConfig, *, step: int, seed: int
    ) -> tuple[Experience, dict[str, float]]:
        """Take one optimizer step on an experience with advantages. Result: the experience with
        log-probabilities, and metrics by name.
        """
        ...

    def sft_step(self, batch: Batch, *, step: int) -> dict[str, float]: ...
    def dpo_step(
        self, batch: Batch, reference: Tensor, *, beta: float, label_smoothing: float, step: int
    ) -> dict[str, float]: ...
    def snapshot(self, with_optimizer: bool = True) -> Writable:
        """A copy of the trained networks; with the optimizer's state, all that another learner
        needs to go on from here.
        """
        ...


class Engine(Protocol):
    """What plays episodes, wherever that is."""

    def collect(
        self,
        items: Sequence[Item],
        *,
        num_samples: int,
        step: int,
        max_turns: int,
        temperature: float,
        seed: int,
        read_last: bool = False,
        progress: Callable[[int], None] = ...,
    ) -> list[Trajectory]: ...
    def publish(self, learner: Any, version: int) -> float:
        """learner: of the same `open_compute`."""
        ...

    def usage(self) -> EngineUsage:
        """As `Policy.usage`; of several engines the sum."""
        ...


def num_accelerators(cfg: RunConfig) -> float:
    """GPUs that a training holds, those of its engines among them; 0 on a CPU."""
    if cfg.compute_device == "cpu":
        return 0.0
    ray = cfg.ray
    held = ray.num_ranks * ray.rank_gpus + ray.num_workers * ray.worker_gpus
    return held if cfg.compute == "ray" else 1.0


@contextmanager
def open_compute(
    cfg: RunConfig, plan: LearnerPlan, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[tuple[Learner, Engine]]:
    """A learner, and an engine that holds the checkpoint's weights as `version`.
    Errors: where a server is not what training may use; see `open_cluster`; ConfigError where the
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
        own = plan.build(SingleProcess(cfg.compute_device))
        with inline.open_engine(cfg, checkpoint, endpoints, version=version) as single:
            yield own, single


@contextmanager
def open_learner(cfg: RunConfig, plan: LearnerPlan) -> Iterator[Learner]:
    """A learner alone. Errors: see `open_cluster`."""
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
