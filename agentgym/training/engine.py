"""A policy, its environments and one event loop: everything an episode needs, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from agentgym.algorithms.batch import Batch
from agentgym.config import RunConfig
from agentgym.rollouts.client import EnvPool, check_endpoints
from agentgym.rollouts.collect import collect
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.training.checkpoint import Checkpoint
from agentgym.training.learner import EngineMismatch, Learner
from agentgym.training.model import weights_of
from agentgym.types import Item, Trajectory

CANARY_TOLERANCE = 1e-4  # nats; fp32 engine and learner agree to 1e-5, a forgotten publish shows as about 100 x the learning rate


@dataclass
class Engine:
    """Generates episodes. `publish` and `collect` are synchronous: the event loop runs inside."""

    cfg: RunConfig
    checkpoint: Checkpoint
    policy: TorchPolicy
    pool: EnvPool
    runner: asyncio.Runner
    system: str

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
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Trajectory]:
        """Trajectories in admission order; see `agentgym.rollouts.collect.collect`."""
        rollout = self.cfg.rollout
        settings = EpisodeSettings(
            seed=seed,
            step=step,
            max_turns=max_turns,
            temperature=temperature,
            max_new_tokens=rollout.max_new_tokens,
            context_tokens=self.cfg.model.context_tokens,
            system=self.system,
            action_format=rollout.action_format,
        )
        return self.runner.run(
            collect(
                items,
                num_samples=num_samples,
                pool=self.pool,
                policy=self.policy,
                renderer=self.checkpoint.renderer,
                settings=settings,
                concurrency=rollout.concurrency,
                episode_timeout_s=rollout.episode_timeout_s,
                max_attempts=rollout.max_attempts,
                max_env_error_frac=rollout.max_env_error_frac,
                deterministic=self.cfg.deterministic,
                first_sample=first_sample,
                progress=progress,
            )
        )

    def publish(self, learner: Learner, version: int) -> float:
        """Hand the learner's weights to the engine and prove that they arrived.

        Result: the canary's largest difference, nats. Errors: EngineMismatch.
        """
        self.runner.run(self.policy.publish(weights_of(learner.model), version))
        rows = canary_rows(self.checkpoint.tokenizer)
        tokens = [token for row in rows for token in row]
        starts = torch.cumsum(torch.tensor([0, *map(len, rows)]), 0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[starts[:-1]] = False
        zeros = torch.zeros(len(tokens))
        batch = Batch(torch.tensor(tokens), starts, mask, zeros, zeros, torch.zeros(len(rows), dtype=torch.int64), 1.0)
        ours, theirs = learner.score(batch)[mask], torch.cat(self.policy.score(rows))
        gap = float((ours - theirs).abs().max())
        if not gap <= CANARY_TOLERANCE:
            raise EngineMismatch(
                f"weights version {version} did not reach the engine: canary prompts differ by {gap:.3g} nats (limit {CANARY_TOLERANCE:g})"
            )
        return gap


def canary_rows(tokenizer: Any) -> list[list[int]]:
    """A few fixed token rows that exercise every layer."""
    size = len(tokenizer)
    return [[(7 * row + 13 * column) % size for column in range(1, 17)] for row in range(4)]


@contextmanager
def open_engine(cfg: RunConfig, checkpoint: Checkpoint, endpoints: Sequence[str], *, version: int) -> Iterator[Engine]:
    """An engine with its own copy of the checkpoint's weights. Errors: where a server is not what training may use."""
    policy = TorchPolicy(
        checkpoint.another_model(),
        stop_id=checkpoint.renderer.stop_id,
        num_slots=cfg.rollout.concurrency,
        context_tokens=cfg.model.context_tokens,
    )
    policy.version = version
    with open_pool(cfg, endpoints, allow_expert=False) as (pool, runner):
        system = (runner.run(pool.info()))[0].instructions if cfg.rollout.system_prompt else ""
        yield Engine(cfg, checkpoint, policy, pool, runner, system)


@contextmanager
def open_pool(cfg: RunConfig, endpoints: Sequence[str], *, allow_expert: bool) -> Iterator[tuple[EnvPool, asyncio.Runner]]:
    """A client of the servers, checked, and the event loop it lives in."""
    with asyncio.Runner() as runner:
        pool = EnvPool(endpoints, request_timeout_s=cfg.env.request_timeout_s)
        runner.run(pool.__aenter__())
        try:
            runner.run(check_endpoints(pool, expect_env=cfg.env.name, allow_expert=allow_expert, expect_options=cfg.env.options))
            yield pool, runner
        finally:
            runner.run(pool.__aexit__(None, None, None))
