"""An engine that sends episodes to rollout workers, each of which is a process with its own engine.

An episode of a lost worker is played again in another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

from agentgym.compute.learner_ranks import RankLost
from agentgym.compute.transfer import SLACK_S, Sender, cause_of, end, first_line
from agentgym.compute.worker import WorkerPlan
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.transport import TransportBroken
from agentgym.rollouts.collect import Lockstep, in_order, require_valid, samples
from agentgym.rollouts.engine import (
    EngineComparison,
    LoopThread,
    RolloutRequest,
    canary_of,
    shares_device,
)
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.policies.engines import num_processes, start_timeout_s
from agentgym.types import Delivery, EngineUsage, Item, Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_S = 15.0  # for workers to end on their own


class WorkersLost(RuntimeError):
    """More rollout workers were lost than `ray.max_lost_workers` allows."""


@dataclass(frozen=True)
class Published:
    """The newest weights, which every worker must hold."""

    sender: Sender | None  # None: the weights of the plan
    version: int
    sequences: list[list[int]] = field(default_factory=list)  # of the canary
    ours: Tensor | None = None  # the learner's scores of them; None before the first publish


@dataclass(eq=False)
class Worker:
    """The driver's view of a live rollout worker."""

    index: int
    actor: Any
    version: int
    where: str = "not started yet"
    num_episodes: int = 0  # in flight
    seen: EngineComparison | None = None  # result of its last canary


class RayEngine:
    """An `Engine` whose episodes are played by workers, each episode sent to the least busy one."""

    def __init__(
        self,
        plan: WorkerPlan,
        checkpoint: Checkpoint,
        spawn: Callable[[int], Any],
        num_workers: int,
        loop: LoopThread,
    ) -> None:
        """Prepare the engine; `start` starts its workers. spawn: index -> a new worker's actor."""
        self._plan, self._cfg = plan, plan.cfg
        self.workers: list[Worker] = []
        self._spawn, self._num_workers, self.loop = spawn, num_workers, loop
        self._canary = canary_of(self._cfg, checkpoint)
        self._weights = Published(None, plan.version)
        self.instructions: dict[str, str] = {}
        self._num_lost = 0
        self._usages: dict[Worker, EngineUsage] = {}  # last reports, of lost workers too
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        rollout = self._cfg.rollout
        self._sending = asyncio.Lock()
        self._patience_s = rollout.max_attempts * rollout.episode_timeout_s + SLACK_S
        self._publish_s = max(self._patience_s, 2 * rollout.publish_timeout_s + SLACK_S)

    def start(self) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._bring_up(index) for index in range(self._num_workers)))

        self._run(all_of_them())

    def collect(
        self, request: RolloutRequest, progress: Callable[[int], None] = lambda _: None
    ) -> list[Trajectory]:
        """Play the request's samples and return their trajectories, item by item, with failed ones.
        progress: called with 1 after each episode.
        Errors: RolloutError if too many episodes failed; WorkersLost; those of a worker.
        """
        rollout = self._cfg.rollout
        settings = request.settings(self._cfg, self.instructions)
        slots = asyncio.Semaphore(rollout.concurrency)

        async def one(item: Item, sample: int) -> Trajectory:
            async with slots:
                trajectory, _ = await self.play(item, sample, settings)
            progress(1)
            return trajectory

        async def all_of_them() -> list[Trajectory]:
            admitted = samples(request.items, request.num_samples)
            await self._between_updates("wake")
            played = await in_order([one(item, sample) for item, sample in admitted])
            await self._between_updates("sleep")
            return played

        trajectories = self._run(all_of_them())
        require_valid(
            trajectories,
            max_attempts=rollout.max_attempts,
            max_env_error_frac=rollout.max_env_error_frac,
        )
        self._canary.take(trajectories)
        return trajectories

    def attempts(self, settings: EpisodeSettings) -> WorkersAttempts:
        """Return a player of single episodes, whose coroutines must run in `loop`."""
        return WorkersAttempts(self, settings)

    async def _between_updates(self, method: str) -> None:
        """Call "wake" or "sleep" of all workers if they may share GPUs with ranks. A worker that
        starts later is awake.
        """
        if shares_device(self._cfg):
            await self._ask_all(method, self._publish_s)

    async def _ask_all(self, method: str, limit_s: float) -> dict[Worker, Any]:
        """Call a method of all workers at once. Result: the answers by worker, without None and
        without workers that are lost meanwhile.
        """

        async def ask(worker: Worker) -> tuple[Worker, Any]:
            answer = _within(getattr(worker.actor, method).remote(), limit_s)
            return worker, await self._survive(worker, answer)

        answers = await asyncio.gather(*map(ask, tuple(self.workers)))
        return {worker: answer for worker, answer in answers if answer is not None}

    def publish(self, learner: Any, version: int) -> float:
        """Send rank 0's weights as `version` to every worker, then compare their scores of the
        canary with the learner's. Result: the largest difference, nats. learner: a `RayLearner`.
        Errors: EngineMismatch, WorkersLost, RankLost, TransportBroken.
        """
        import ray

        transport, sequences = self._cfg.ray.transport, self._canary.sequences
        ours = self._canary.score(learner, sequences)
        # this deadline must end before the engine's own
        sender = learner.export(version, transport, self._cfg.rollout.publish_timeout_s / 4)
        self._canary.sent(sender.digest, version)
        self._weights = Published(sender, version, sequences, ours)

        async def all_of_them() -> float:
            workers = tuple(self.workers)
            for worker, error in zip(workers, await self._send(sender, workers), strict=True):
                if isinstance(error, ray.exceptions.RayTaskError):
                    logger.warning("%s; the weights are sent again", first_line(cause_of(error)))
                elif error is not None:
                    self._lose(worker, error)
            await asyncio.gather(
                *(self._survive(worker, self._update(worker)) for worker in tuple(self.workers))
            )
            await self._pick()  # if all were lost, wait for the first replacement
            return max(worker.seen.gap for worker in self.workers if worker.seen)

        return self._run(all_of_them())

    def usage(self) -> EngineUsage:
        """Return the sum of all workers' usage; a lost worker counts up to its last report."""
        self._usages |= self._run(self._ask_all("usage", self._patience_s))
        return sum(self._usages.values(), start=EngineUsage())

    def close(self) -> None:
        """Cancel unfinished rollouts, let the workers close within CLOSE_S, then kill them."""

        async def ask(worker: Worker) -> None:
            with contextlib.suppress(Exception):  # already gone, or killed below
                await _within(worker.actor.close.remote(), CLOSE_S)

        async def all_of_them() -> None:
            await asyncio.gather(*map(ask, self.workers))

        self.loop.cancel()  # abandoned rollouts
        self.loop.run(all_of_them())
        end([worker.actor for worker in self.workers])

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        import ray

        try:
            return self.loop.run(coroutine)
        except ray.exceptions.RayTaskError as error:  # raised in a worker: keep the error's class
            raise cause_of(error) from None

    async def play(
        self, item: Item, sample: int, settings: EpisodeSettings
    ) -> tuple[Trajectory, list[Trajectory]]:
        """Play one episode on the least busy worker; if that is lost, again on another.
        Arguments and result: see `RolloutWorker.play`. Errors: WorkersLost; those of the worker.
        """
        while True:
            worker = await self._pick()
            worker.num_episodes += 1
            try:
                played = worker.actor.play.remote(item, sample, settings)
                answer = await self._survive(worker, self._while_it_lives(worker, played))
            finally:
                worker.num_episodes -= 1
            if answer is not None:
                return answer

    async def _while_it_lives(
        self, worker: Worker, answer: Any
    ) -> tuple[Trajectory, list[Trajectory]]:
        """Wait for an episode as long as its worker answers other calls, and return it. The worker
        itself limits the time of environments, engine and attempts.
        Errors: TimeoutError if the worker does not answer.
        """
        episode = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait((episode,), timeout=self._patience_s))[0]:
                await _within(worker.actor.usage.remote(), self._patience_s)
            return cast(tuple[Trajectory, list[Trajectory]], await episode)
        finally:
            episode.cancel()  # if the worker is lost or the rollouts are abandoned

    async def _pick(self) -> Worker:
        """Return the least busy worker; wait if there is none.
        Errors: WorkersLost; the error of a replacement that did not start.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self.workers:
                return min(self.workers, key=lambda worker: worker.num_episodes)
            self._changed.clear()
            await self._changed.wait()  # no deadline: `_bring_up` has one

    async def _survive(self, worker: Worker, answer: Awaitable[T]) -> T | None:
        """Return the worker's answer; None if it died or is silent. Then it counts as lost: later
        answers are ignored and, within `ray.max_lost_workers`, it is replaced.
        Errors: those of the called method.
        """
        import ray

        try:
            return await answer
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._lose(worker, error)
            return None

    def _lose(self, worker: Worker, error: BaseException) -> None:
        if worker not in self.workers:
            return  # another of its episodes has reported it
        self.workers.remove(worker)
        self._num_lost += 1
        reason = f"{type(error).__name__}: {first_line(error)}"
        if self._num_lost > self._cfg.ray.max_lost_workers:
            self._fail(
                WorkersLost(
                    f"{self._num_lost} rollout workers were lost (limit ray.max_lost_workers"
                    f" {self._cfg.ray.max_lost_workers}), the last, {worker.where}: {reason}; run"
                    " the step again to go on from its last commit"
                )
            )
            return
        logger.warning(
            "rollout worker %d (%s) is lost: %s; its unfinished episodes are played again",
            worker.index,
            worker.where,
            reason,
        )
        task = asyncio.get_running_loop().create_task(self._replace(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: Worker) -> None:
        try:
            await asyncio.to_thread(end, [lost.actor])
            await self._bring_up(lost.index)
        except Exception as error:
            self._fail(cause_of(error))

    def _fail(self, error: BaseException) -> None:
        self._failure = error if isinstance(error, Exception) else RuntimeError(str(error))
        self._changed.set()

    async def _bring_up(self, index: int) -> None:
        """Start a worker, send it the newest weights, and add it to `workers`.
        A worker that is lost during its start counts, and is replaced, like any other.
        Errors: those that the worker raised; those of `_update`.
        """
        import ray

        worker = Worker(index, await asyncio.to_thread(self._spawn, index), self._plan.version)
        try:
            worker.where, self.instructions = await _within(
                worker.actor.start.remote(self._plan),
                self._cfg.ray.placement_timeout_s
                + max(env.start_timeout_s for env in self._cfg.envs)
                + start_timeout_s(self._cfg),
            )
            await self._update(worker)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.workers.append(worker)
            self._lose(worker, error)
            return
        logger.info(
            "rollout worker %d is %s, weights version %d", index, worker.where, worker.version
        )
        self.workers.append(worker)
        self._changed.set()

    async def _update(self, worker: Worker) -> None:
        """Send the worker the newest weights, also if these change meanwhile; compare its scores of
        the canary with the learner's, once there are any. Errors: EngineMismatch; those of `_send`.
        """
        while True:
            weights = self._weights
            if weights.sender is not None and worker.version != weights.version:
                (error,) = await self._send(weights.sender, [worker])
                # a broken transport is no error once newer weights have replaced these
                if error and (
                    weights is self._weights or not isinstance(cause_of(error), TransportBroken)
                ):
                    raise error
                continue
            if weights.ours is not None:
                answer = worker.actor.score.remote(weights.sequences)
                scores = await _within(answer, self._patience_s)
                name = f"rollout worker {worker.index} ({worker.where})"
                worker.seen = self._canary.compare(
                    weights.ours, scores, weights.version, name, worker.seen
                )
            if weights is self._weights:
                return

    async def _send(self, sender: Sender, workers: Sequence[Worker]) -> list[BaseException | None]:
        """Send weights to these workers, once earlier calls of this method are done, and set their
        `version`. Result: each worker's error, or None. Errors: as `_of_sender`.
        """
        if not workers:
            return []

        async def one(worker: Worker, delivery: Delivery) -> None:
            await _within(worker.actor.publish.remote(delivery), self._publish_s)
            worker.version = delivery.version

        async with self._sending:
            receivers = [num_processes(self._cfg)] * len(workers)
            opening = asyncio.to_thread(sender.open, receivers)
            deliveries, sent = await self._of_sender(opening)
            publishing = map(one, workers, deliveries)
            errors = await asyncio.gather(*publishing, return_exceptions=True)
            if sent is not None:
                with contextlib.suppress(TransportBroken):  # the workers report it
                    await self._of_sender(_within(sent, self._publish_s))
        return errors

    async def _of_sender(self, answer: Awaitable[T]) -> T:
        """Return the sender's answer. Errors: the sender's own; RankLost if none comes."""
        import ray

        try:
            return await answer
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise RankLost(
                f"rank 0 of the learner was lost while it sent weights: {first_line(error)}; run"
                " the step again to go on from its last commit"
            ) from None


@dataclass(frozen=True)
class WorkersAttempts:
    """Player of single episodes on the engine's workers; they repeat a failed attempt."""

    engine: RayEngine
    settings: EpisodeSettings

    async def play(
        self,
        item: Item,
        sample: int,
        barrier: Lockstep | None = None,  # unused: `deterministic` needs compute inline
        failed: Callable[[Trajectory], None] = lambda _: None,
    ) -> Trajectory:
        last, others = await self.engine.play(item, sample, self.settings)
        for other in others:
            failed(other)
        return last


async def _within(reference: Any, seconds: float) -> Any:
    """Await a result and return it. Errors: TimeoutError, with a message, after `seconds`."""
    try:
        return await asyncio.wait_for(reference, seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
