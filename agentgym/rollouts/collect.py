"""Episodes in bulk: free-running, or in lock-step where a run must be repeatable to the bit."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from agentgym.rollouts.chat import ChatRenderer
from agentgym.rollouts.client import EnvError, EnvPool
from agentgym.rollouts.episode import Episode, EpisodeSettings, run_episode
from agentgym.types import Completion, Item, Policy, Sampling, Status, Trajectory

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """Too many environments failed for the batch to mean anything."""


class Lockstep:
    """Releases `generate` calls only when every live episode waits in one, in canonical order.

    The engine's batches then depend on the episodes alone, never on which environment answered first.
    """

    def __init__(self, policy: Policy, num_live: int) -> None:
        self._policy, self._live = policy, num_live
        self._waiting: list[tuple[Sampling, list[int], asyncio.Future[Completion]]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((sampling, prompt_ids, future))
        self._release()
        return await future

    async def publish(self, weights: dict[str, object], version: int) -> None:
        await self._policy.publish(weights, version)

    def leave(self) -> None:
        """An episode has ended."""
        self._live -= 1
        self._release()

    def _release(self) -> None:
        if not self._waiting or len(self._waiting) < self._live:
            return
        wave, self._waiting = sorted(self._waiting, key=lambda call: call[0].key), []
        self._tasks = [asyncio.create_task(self._forward(*call)) for call in wave]

    async def _forward(self, sampling: Sampling, prompt_ids: list[int], future: asyncio.Future[Completion]) -> None:
        try:
            result = await self._policy.generate(prompt_ids, sampling)
        except Exception as error:  # handed on to the episode that asked
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)


async def collect(
    items: Sequence[Item],
    *,
    num_samples: int,
    pool: EnvPool,
    policy: Policy,
    renderer: ChatRenderer,
    settings: EpisodeSettings,
    concurrency: int,
    episode_timeout_s: float,
    max_attempts: int,
    max_env_error_frac: float,
    deterministic: bool = False,
    first_sample: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Trajectory]:
    """`num_samples` trajectories of each item, in admission order: never the first to finish, who are the successful.

    progress: called with 1 for each finished episode.
    Errors: RolloutError where more than `max_env_error_frac` of the episodes failed after `max_attempts` tries each.
    """
    admitted = [(item, first_sample + sample) for item in items for sample in range(num_samples)]
    nonce = uuid.uuid4().hex  # request keys of an earlier, killed attempt at this step must not be met again
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Item, sample: int, using: Policy) -> Trajectory:
        for attempt in range(1, max_attempts + 1):
            request_key = f"{nonce}-{settings.step}-{item.item_id}-{sample}-{attempt}"
            trajectory = await _attempt(item, sample, attempt, request_key, using)
            if trajectory.status.is_valid:
                break
            logger.warning("episode %s sample %d attempt %d/%d: %s", item.item_id, sample, attempt, max_attempts, trajectory.error)
        progress(1)
        return trajectory

    async def _attempt(item: Item, sample: int, attempt: int, request_key: str, using: Policy) -> Trajectory:
        episode = Episode(item, sample, settings, first_observation="")
        try:
            async with asyncio.timeout(episode_timeout_s), pool.session(item, request_key) as session:
                episode.first_observation = session.observation
                status = await run_episode(using, session, renderer, episode)
        except EnvError as error:
            return episode.finish(Status.ENV_ERROR, num_attempts=attempt, error=str(error))
        except TimeoutError:
            return episode.finish(Status.TIMEOUT, num_attempts=attempt, error=f"no end within {episode_timeout_s:g} s")
        return episode.finish(status, num_attempts=attempt)

    async def free(item: Item, sample: int) -> Trajectory:
        async with slots:
            return await one(item, sample, policy)

    async def in_step(item: Item, sample: int, barrier: Lockstep) -> Trajectory:
        try:
            return await one(item, sample, barrier)
        finally:
            barrier.leave()

    trajectories: list[Trajectory] = []
    if deterministic:
        for first in range(0, len(admitted), concurrency):
            wave = admitted[first : first + concurrency]
            barrier = Lockstep(policy, len(wave))
            trajectories += await _all([in_step(item, sample, barrier) for item, sample in wave])
    else:
        trajectories = await _all([free(item, sample) for item, sample in admitted])
    failed = [trajectory for trajectory in trajectories if not trajectory.status.is_valid]
    if len(failed) > max_env_error_frac * len(trajectories):
        raise RolloutError(
            f"{len(failed)} of {len(trajectories)} episodes failed after {max_attempts} attempts each "
            f"(limit {max_env_error_frac:.0%}); last, {failed[-1].item.item_id}: {failed[-1].error}"
        )
    return trajectories


async def _all(coroutines: Sequence[object]) -> list[Trajectory]:
    """Results in order; the first failure cancels the rest and is raised as itself."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
