"""Play many episodes: independently, or in lock-step if a run must be repeatable to the bit. Also
compute their metrics, which the audit computes again from the stored episodes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

from agentgym.algorithms.recipe import all_equal
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import (
    Episode,
    EpisodeSettings,
    PlayerFailed,
    PlayerOf,
    environment_time,
    no_pace,
    run_episode,
)
from agentgym.rollouts.pools import EnvPool, EnvPools
from agentgym.types import Item, SampleKey, Status, Trajectory
from envs.wire import ErrorKind

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """More episodes failed than `max_env_error_frac` allows, so the batch means nothing."""


class Lockstep:
    """A barrier that lets `num_live` episodes continue only when all of them wait, in key order.

    The engine's batches then depend only on the episodes, never on which environment answered
    first.
    """

    def __init__(self, num_live: int) -> None:
        self._live = num_live
        self._waiting: list[tuple[SampleKey, asyncio.Future[None]]] = []

    async def wait(self, key: SampleKey) -> None:
        """Wait until all live episodes wait here; they then continue in the order of their keys."""
        loop = asyncio.get_running_loop()
        entry = (key, loop.create_future())
        self._waiting.append(entry)
        loop.call_soon(self._release)  # not now: the last one must not overtake the waiting ones
        try:
            await entry[1]
        finally:
            if entry in self._waiting:  # cancelled
                self._waiting.remove(entry)

    def leave(self) -> None:
        """Remove one ended episode from the barrier; the others no longer wait for it."""
        self._live -= 1
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if len(self._waiting) < self._live:
            return
        wave, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        for _, future in wave:
            if not future.done():  # cancelled
                future.set_result(None)  # tasks wake in this order


class PlaysEpisodes(Protocol):
    """Interface of objects that play episodes, in this process or in another."""

    async def play(
        self,
        item: Item,
        sample: int,
        barrier: Lockstep | None = None,
        failed: Callable[[Trajectory], None] = ...,
    ) -> Trajectory:
        """Play an episode, see `Attempts.play`."""
        ...


@dataclass
class Attempts:
    """Runner of whole episodes, with up to `max_attempts` attempts at each until one is valid."""

    pool: EnvPool | EnvPools
    player_of: PlayerOf
    settings: EpisodeSettings
    episode_timeout_s: float
    max_attempts: int
    # request keys of an earlier, killed process at this step must not be reused
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    failures: list[str] = field(default_factory=list)  # one line per failed attempt

    async def play(
        self,
        item: Item,
        sample: int,
        barrier: Lockstep | None = None,
        failed: Callable[[Trajectory], None] = lambda _: None,
    ) -> Trajectory:
        """Play an episode; return the trajectory of the first valid attempt, else of the last one.
        No attempt follows a final failure of the player. Failures are logged and added to
        `failures`. barrier: awaited before each turn.
        failed: called with the trajectory of every failed attempt that is repeated.
        """
        settings = self.settings
        for attempt in range(1, self.max_attempts + 1):
            key = f"{self.nonce}-{settings.step}-{item.item_id}-{sample}-{attempt}"
            trajectory, again = await self._attempt(item, sample, attempt, key, barrier)
            if trajectory.status.is_valid:
                break
            # a lost server fails a whole batch: a warning for each episode would bury the error
            # at the end of the command
            level = logging.INFO if self.failures else logging.WARNING
            self.failures.append(
                f"{item.item_id} sample {sample} attempt {attempt}/{self.max_attempts}:"
                f" {trajectory.error}"
            )
            logger.log(level, "episode %s", self.failures[-1])
            if not again:
                break
            if attempt < self.max_attempts:
                failed(trajectory)
        return trajectory

    async def _attempt(
        self, item: Item, sample: int, attempt: int, request_key: str, barrier: Lockstep | None
    ) -> tuple[Trajectory, bool]:
        """Play once, in a session opened with `request_key`. If the environment or player fails, or
        the time limit passes before the end, the trajectory has the error and an invalid status.
        Result: (trajectory, True if another attempt can help).
        """
        episode = Episode(item, sample, self.settings, first_observation="")
        status: Status | None = None
        try:
            async with (
                environment_time(self.episode_timeout_s),
                self.pool.session(item, request_key) as session,
            ):
                episode.first_observation = session.observation
                pace = no_pace if barrier is None else barrier.wait
                status = await run_episode(self.player_of(item, sample), session, episode, pace)
        except EnvError as error:
            is_grader = error.kind == ErrorKind.GRADER_FAILED
            ended, message = Status.GRADER_ERROR if is_grader else Status.ENV_ERROR, str(error)
        except PlayerFailed as error:
            last = episode.finish(Status.INTERRUPTED, num_attempts=attempt, error=str(error))
            return last, not error.final
        except TimeoutError:
            # if the episode had ended, only closing its session took too long
            if status is not None:
                return episode.finish(status, num_attempts=attempt), False
            ended = Status.TIMEOUT
            message = f"its environment took more than {self.episode_timeout_s:g} s"
        else:
            return episode.finish(status, num_attempts=attempt), False
        return episode.finish(ended, num_attempts=attempt, error=message), True


async def collect(
    admitted: Sequence[tuple[Item, int]],
    *,
    pool: EnvPool | EnvPools,
    player_of: PlayerOf,
    settings: EpisodeSettings,
    concurrency: int,
    episode_timeout_s: float,
    max_attempts: int,
    max_env_error_frac: float,
    deterministic: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Trajectory]:
    """Play every admitted (item, sample); return the trajectories in this order, failed ones too.
    Taking those that finish first instead would favor the successful ones.

    concurrency: episodes at a time. deterministic: these play in lock-step, see `in_lockstep`.
    progress: called with 1 for each finished episode.
    Errors: RolloutError if more than `max_env_error_frac` of the episodes failed after
    `max_attempts` tries each.
    """
    attempts = Attempts(pool, player_of, settings, episode_timeout_s, max_attempts)
    slots = asyncio.Semaphore(concurrency)

    async def free(item: Item, sample: int) -> Trajectory:
        async with slots:
            trajectory = await attempts.play(item, sample)
            progress(1)
            return trajectory

    trajectories: list[Trajectory] = []
    if deterministic:
        for first in range(0, len(admitted), concurrency):
            wave = admitted[first : first + concurrency]
            trajectories += await in_lockstep(attempts, wave, progress)
    else:
        trajectories = await in_order([free(item, sample) for item, sample in admitted])
    num_failed = require_valid(
        trajectories, max_attempts=max_attempts, max_env_error_frac=max_env_error_frac
    )
    failures = attempts.failures
    if len(failures) > 1:
        counts = len(failures), len(trajectories), num_failed, failures[-1]
        text = "%d attempts at %d episodes failed, %d episodes for good; last: %s"
        logger.warning(text, *counts)
    return trajectories


async def in_lockstep(
    attempts: PlaysEpisodes,
    wave: Sequence[tuple[Item, int]],
    progress: Callable[[int], None] = lambda _: None,
    failed: Callable[[Trajectory], None] = lambda _: None,
) -> list[Trajectory]:
    """Play all (item, sample) of a wave together, turn by turn; return trajectories in order.
    Equal waves give the engine equal batches, whenever they are played.
    progress: called with 1 for each finished episode. failed: see `Attempts.play`.
    """
    barrier = Lockstep(len(wave))

    async def one(item: Item, sample: int) -> Trajectory:
        try:
            trajectory = await attempts.play(item, sample, barrier, failed)
            progress(1)
            return trajectory
        finally:
            barrier.leave()

    return await in_order([one(item, sample) for item, sample in wave])


def samples(items: Sequence[Item], num_samples: int) -> list[tuple[Item, int]]:
    """Return [(item, sample)], `num_samples` of each item in order; samples count from 0."""
    return [(item, sample) for item in items for sample in range(num_samples)]


def require_valid(
    trajectories: Sequence[Trajectory], *, max_attempts: int, max_env_error_frac: float
) -> int:
    """Return the number of failed episodes. max_attempts: tries at each, for the error's text.
    Errors: RolloutError if their share exceeds `max_env_error_frac`.
    """
    failed = [trajectory for trajectory in trajectories if not trajectory.status.is_valid]
    if len(failed) > max_env_error_frac * len(trajectories):
        raise RolloutError(
            f"{len(failed)} of {len(trajectories)} episodes failed after {max_attempts} attempts"
            f" each (limit {max_env_error_frac:.0%}); last, {failed[-1].item.item_id}:"
            f" {failed[-1].error}; see to the environment servers. Nothing committed is lost: the"
            " same command continues"
        )
    return len(failed)


async def in_order(coroutines: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """Run all together; return results in order. The first error cancels the rest and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of successes of one or more episodes as `validation/success` and, with
    several environments, `validation/ENV/success`. A key without a valid episode is missing.
    """
    metrics = rollout_metrics(trajectories)
    return {
        name.replace("rollout/", "validation/"): value
        for name, value in metrics.items()
        if name.endswith("/success")
    }


def success_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of successes among the valid episodes; 0 if there are none."""
    valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid]
    return sum(trajectory.success for trajectory in valid) / len(valid) if valid else 0.0


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of one or more episodes by name, for example `rollout/success`.

    Failed episodes count only in `num_episodes` and `env_error_frac`. If all failed, there are
    only these two and `max_turns`. With several environments, there are also metrics of the valid
    episodes of each one, for example `rollout/babyai/success`.
    """
    valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid]
    total = len(trajectories)
    metrics = {
        "rollout/num_episodes": float(total),
        "rollout/env_error_frac": (total - len(valid)) / total,
        "rollout/max_turns": float(trajectories[0].max_turns),
    }
    if not valid:
        return metrics
    statuses = Counter(trajectory.status for trajectory in valid)
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory in valid:
        groups[trajectory.item.item_id].append(trajectory.reward or 0.0)
    envs = sorted({trajectory.item.env for trajectory in trajectories})
    for env in envs if len(envs) > 1 else ():
        env_valid = [trajectory for trajectory in valid if trajectory.item.env == env]
        metrics[f"rollout/{env}/num_episodes"] = float(len(env_valid))
        if env_valid:
            figures = rollout_metrics(env_valid)
            for name in ("success", "reward_mean", "turns_mean"):
                metrics[f"rollout/{env}/{name}"] = figures[f"rollout/{name}"]
    count = len(valid)
    logprobs = [
        logprob
        for trajectory in valid
        for logprob in compress(trajectory.engine_logprobs, trajectory.action_mask)
        if logprob is not None
    ]
    if logprobs:
        # entropy of the sampling distributions, estimated from the samples: known at every step,
        # also without training
        metrics["rollout/entropy"] = -sum(logprobs) / len(logprobs)
    return metrics | {
        "rollout/success": success_share(valid),
        "rollout/reward_mean": sum(trajectory.reward or 0.0 for trajectory in valid) / count,
        "rollout/turns_mean": sum(len(trajectory.turns) for trajectory in valid) / count,
        "rollout/tokens_mean": sum(len(trajectory.input_ids) for trajectory in valid) / count,
        "rollout/action_tokens_mean": (
            sum(sum(trajectory.action_mask) for trajectory in valid) / count
        ),
        "rollout/truncated_frac": sum(t.status.is_truncated for t in valid) / count,
        "rollout/max_turns_frac": statuses[Status.MAX_TURNS] / count,
        "rollout/max_tokens_frac": statuses[Status.MAX_TOKENS] / count,
        "rollout/env_limit_frac": statuses[Status.ENV_LIMIT] / count,
        "rollout/equal_reward_groups_frac": sum(map(all_equal, groups.values())) / len(groups),
    }
