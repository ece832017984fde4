"""A policy, its environments and one event loop: everything an episode needs, opened and closed
together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from agentgym.algorithms.batch import Batch
from agentgym.config import RunConfig
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.transport import InProcess
from agentgym.rollouts.canary import Canary, Seen
from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.guide import Guide
from agentgym.rollouts.loop import LoopThread
from agentgym.rollouts.players import token_players
from agentgym.rollouts.policies.engines import engine_dtype, tolerance_of
from agentgym.rollouts.policies.opening import open_policy
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Endpoints, EngineUsage, Item, Policy, Trajectory


class HasWeights(Protocol):
    """The part of a learner that an engine uses."""

    def weights(self) -> dict[str, Tensor]: ...
    def score(self, batch: Batch) -> Tensor: ...


@dataclass
class LocalEngine:
    """An engine that plays episodes from this process.
    `publish` and `collect` may be called from two threads: rollouts continue while weights change.
    """

    cfg: RunConfig
    checkpoint: Checkpoint
    policy: Policy
    pool: EnvPools
    loop: LoopThread
    instructions: Mapping[str, str]  # by environment; empty if episodes begin without them
    seen: Seen | None = None  # result of the last canary

    @cached_property
    def canary(self) -> Canary:
        return canary_of(self.cfg, self.checkpoint)

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
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Trajectory]:
        """Collect trajectories in admission order, see `agentgym.rollouts.collect.collect`.
        The policy wakes for it and sleeps afterwards if it shares a device with the learner.
        """
        rollout = self.cfg.rollout
        settings = episode_settings(
            self.cfg,
            instructions=self.instructions,
            seed=seed,
            step=step,
            max_turns=max_turns,
            temperature=temperature,
            read_last=read_last,
        )
        if shares_device(self.cfg):
            self.loop.run(self.policy.wake())
        trajectories = self.loop.run(
            collect(
                samples(items, num_samples),
                pool=self.pool,
                player_of=token_players(self.policy, self.checkpoint.renderer),
                settings=settings,
                concurrency=rollout.concurrency,
                episode_timeout_s=rollout.episode_timeout_s,
                max_attempts=rollout.max_attempts,
                max_env_error_frac=rollout.max_env_error_frac,
                deterministic=self.cfg.deterministic,
                progress=progress,
            )
        )
        if shares_device(self.cfg):
            self.loop.run(self.policy.sleep())
        self.canary.take(trajectories)
        return trajectories

    def publish(self, learner: HasWeights, version: int) -> float:
        """Hand the learner's weights to the engine and prove that they arrived.

        Result: the canary's difference, nats. Errors: EngineMismatch.
        """
        delivery = InProcess(learner.weights(), version)
        self.loop.run(self.policy.publish(delivery))
        self.canary.sent(delivery.digest, version)
        sequences = self.canary.sequences
        theirs = self.loop.run(self.policy.score(sequences))
        ours = self.canary.score(learner, sequences)
        self.seen = self.canary.compare(ours, theirs, version, before=self.seen)
        return self.seen.gap

    def usage(self) -> EngineUsage:
        """Return the usage of the policy, see `Policy.usage`."""
        return self.loop.run(self.policy.usage())


def shares_device(cfg: RunConfig) -> bool:
    """Return True if an engine sleeps between rollouts, to leave its memory to a learner.

    It does if both are in one process, or if Ray may place a rank and a worker on one GPU. With
    `max_staleness` it never sleeps, because it samples while the learner updates.
    """
    if cfg.rollout.max_staleness:
        return False
    ray = cfg.ray
    if cfg.compute != "ray":
        return True
    return cfg.compute_device != "cpu" and bool(ray.worker_gpus % 1 and ray.rank_gpus % 1)


def canary_of(cfg: RunConfig, checkpoint: Checkpoint) -> Canary:
    tolerance = tolerance_of(cfg, checkpoint.dtype)
    limit = tolerance.canary
    if cfg.lora.rank or cfg.ray.num_ranks > 1:  # learner and engine sum in different orders
        limit = max(limit, tolerance.forward)
    return Canary(
        checkpoint.tokenizer,
        limit,
        takes_text=engine_dtype(cfg, checkpoint.dtype).itemsize < 4,
    )


def episode_settings(
    cfg: RunConfig, *, instructions: Mapping[str, str], **collection: Any
) -> EpisodeSettings:
    """Return an episode's settings: those of the configuration, and those in `collection`."""
    return EpisodeSettings(
        max_new_tokens=cfg.rollout.max_new_tokens,
        context_tokens=cfg.model.context_tokens,
        instructions=instructions,
        action_format=cfg.rollout.action_format,
        **collection,
    )


def openings(cfg: RunConfig, guides: Mapping[str, Guide]) -> dict[str, str]:
    """Return the opening text of episodes by environment; empty if they begin with the observation.
    Errors: ConfigError if an environment offers too few worked examples.
    """
    rollout = cfg.rollout
    if not rollout.instructions:
        return {}
    return {
        env: guide.opening(env, rollout.examples, rollout.action_format)
        for env, guide in guides.items()
    }


@contextmanager
def open_engine(
    cfg: RunConfig, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[LocalEngine]:
    """Open an engine for the block; it takes over the checkpoint's model.
    Errors: those of `open_policy`; those of `EnvPools.check` if a server is unfit for training.
    """
    with open_pool(cfg, endpoints, allow_expert=False) as (pool, loop, guides):
        policy = open_policy(cfg, checkpoint, num_slots=cfg.rollout.concurrency, version=version)
        # spare the garbage collector a million imported objects, which stay alive anyway
        gc.freeze()
        try:
            yield LocalEngine(cfg, checkpoint, policy, pool, loop, openings(cfg, guides))
        finally:
            loop.cancel()  # abandoned rollouts
            loop.run(policy.close())
            gc.unfreeze()  # gigabytes of weights become garbage with the step


@contextmanager
def open_pool(
    cfg: RunConfig, endpoints: Endpoints, *, allow_expert: bool
) -> Iterator[tuple[EnvPools, LoopThread, dict[str, Guide]]]:
    """Yield (pool, its event loop, environment -> guide) for the block, once the servers passed
    the check. Errors: those of `EnvPools.check`.
    """
    loop = LoopThread()
    try:
        pool = EnvPools.of(cfg.envs, endpoints)
        loop.run(pool.__aenter__())
        try:
            yield pool, loop, loop.run(pool.check(cfg.envs, allow_expert=allow_expert))
        finally:
            loop.cancel()  # abandoned rollouts must not see the pool close
            loop.run(pool.__aexit__(None, None, None))
    finally:
        loop.close()
