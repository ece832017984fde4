"""A policy, its environments and one event loop: everything an episode needs, opened and closed
together.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from agentgym.algorithms.batch import Batch
from agentgym.config import RunConfig
from agentgym.rollouts.client import Endpoints, EnvPools
from agentgym.rollouts.collect import collect
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.training.checkpoint import Checkpoint
from agentgym.training.learner import EngineMismatch, Learner
from agentgym.training.model import set_threads
from agentgym.types import Item, Trajectory

T = TypeVar("T")
ENGINE = TorchPolicy  # what samples; the audit asks it what it promises
CLOSE_TIMEOUT_S = 30.0

# nats; fp32 engine and learner agree to 1e-5, a forgotten publish shows as about 100 x the learning
# rate
CANARY_TOLERANCE = 1e-4


class LoopThread:
    """An event loop in a thread of its own: any thread may run coroutines in it, several at a
    time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        set_threads()  # a setting of each thread
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. Who stops waiting (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def cancel(self) -> None:
        """End what still runs."""

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S)

        self.run(finish())

    def close(self) -> None:
        """End the thread."""
        try:
            self.cancel()
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()


@dataclass
class Engine:
    """Generates episodes.
    `publish` and `collect` may be called from two threads: rollouts go on while weights change.
    """

    cfg: RunConfig
    checkpoint: Checkpoint
    policy: TorchPolicy
    pool: EnvPools
    loop: LoopThread
    manuals: Mapping[str, str]  # by environment; empty where episodes do not begin with them

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
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Trajectory]:
        """Trajectories in admission order; see `agentgym.rollouts.collect.collect`."""
        rollout = self.cfg.rollout
        settings = episode_settings(
            self.cfg,
            manuals=self.manuals,
            seed=seed,
            step=step,
            max_turns=max_turns,
            temperature=temperature,
            read_last=read_last,
        )
        return self.loop.run(
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
        self.loop.run(self.policy.publish(learner.weights(), version))
        canary = Canary(self.checkpoint.tokenizer)
        return canary.compare(
            canary.score(learner), self.loop.run(self._canary(canary.rows)), version
        )

    async def _canary(self, rows: list[list[int]]) -> list[torch.Tensor]:
        return self.policy.score(rows)


class Canary:
    """What learner and engine must agree on after a publish."""

    def __init__(self, tokenizer: Any) -> None:
        self.rows = canary_rows(tokenizer)

    def score(self, learner: Any) -> torch.Tensor:
        """[n] the learner's log-probabilities of every token but each row's first."""
        tokens = torch.tensor([token for row in self.rows for token in row])
        starts = torch.cumsum(torch.tensor([0, *map(len, self.rows)]), 0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[starts[:-1]] = False
        zeros, groups = torch.zeros(len(tokens)), torch.zeros(len(self.rows), dtype=torch.int64)
        scores: torch.Tensor = learner.score(
            Batch(tokens, starts, mask, zeros, zeros, groups, groups.bool(), 1.0)
        )
        return scores[mask]

    @staticmethod
    def compare(
        ours: torch.Tensor, theirs: list[torch.Tensor], version: int, engine: str = "the engine"
    ) -> float:
        """The largest difference, nats. Errors: EngineMismatch."""
        gap = float((ours - torch.cat(theirs)).abs().max())
        if not gap <= CANARY_TOLERANCE:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine}: canary prompts differ by"
                f" {gap:.3g} nats (limit {CANARY_TOLERANCE:g})"
            )
        return gap


def canary_rows(tokenizer: Any) -> list[list[int]]:
    """A few fixed token rows that exercise every layer."""
    size = len(tokenizer)
    return [[(7 * row + 13 * column) % size for column in range(1, 17)] for row in range(4)]


def episode_settings(
    cfg: RunConfig, *, manuals: Mapping[str, str], **collection: Any
) -> EpisodeSettings:
    """What the configuration says about every episode, and `collection` about this one."""
    return EpisodeSettings(
        max_new_tokens=cfg.rollout.max_new_tokens,
        context_tokens=cfg.model.context_tokens,
        manuals=manuals,
        action_format=cfg.rollout.action_format,
        **collection,
    )


@contextmanager
def open_engine(
    cfg: RunConfig, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
) -> Iterator[Engine]:
    """An engine that samples with the checkpoint's model, its own from here on.
    Errors: where a server is not what training may use.
    """
    policy = ENGINE(
        checkpoint.model,
        stop_id=checkpoint.renderer.stop_id,
        num_slots=cfg.rollout.concurrency,
        context_tokens=cfg.model.context_tokens,
    )
    policy.version = version
    # what lives by now lives on: collecting garbage need not look at a million imported objects
    gc.freeze()
    with open_pool(cfg, endpoints, allow_expert=False) as (pool, loop, manuals):
        yield Engine(cfg, checkpoint, policy, pool, loop, manuals)


@contextmanager
def open_pool(
    cfg: RunConfig, endpoints: Endpoints, *, allow_expert: bool
) -> Iterator[tuple[EnvPools, LoopThread, dict[str, str]]]:
    """A client of the servers, checked, the event loop it lives in, and the task manuals
    episodes begin with, by environment.
    """
    loop = LoopThread()
    try:
        pool = EnvPools.of(cfg.envs, endpoints)
        loop.run(pool.__aenter__())
        try:
            manuals = loop.run(pool.check(cfg.envs, allow_expert=allow_expert))
            yield pool, loop, manuals if cfg.rollout.system_prompt else {}
        finally:
            loop.cancel()  # rollouts nobody waits for must not see the pool close under them
            loop.run(pool.__aexit__(None, None, None))
    finally:
        loop.close()
