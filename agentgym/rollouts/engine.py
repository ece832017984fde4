"""The engine of a run: a policy, pools of environment servers and an event loop, opened and closed
together; and the canary, which checks that the policy samples with the learner's weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from agentgym.algorithms.batch import Batch
from agentgym.config import RunConfig
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.model import set_threads
from agentgym.models.transport import InProcess
from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings, Guide, token_players
from agentgym.rollouts.policies.engines import HOSTED, engine_dtype, open_here, tolerance_of
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Endpoints, EngineMismatch, EngineUsage, Item, Policy, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Request to an engine to play `num_samples` episodes of each item."""

    items: Sequence[Item]
    _: KW_ONLY
    num_samples: int
    step: int  # optimizer step the episodes are for
    max_turns: int
    temperature: float
    seed: int
    read_last: bool = False  # see `EpisodeSettings`

    def settings(self, cfg: RunConfig, instructions: Mapping[str, str]) -> EpisodeSettings:
        """Return the settings of these episodes. instructions: by environment."""
        return episode_settings(
            cfg,
            instructions=instructions,
            step=self.step,
            max_turns=self.max_turns,
            temperature=self.temperature,
            seed=self.seed,
            read_last=self.read_last,
        )


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
    seen: EngineComparison | None = None  # result of the last canary

    @cached_property
    def canary(self) -> Canary:
        return canary_of(self.cfg, self.checkpoint)

    def collect(
        self, request: RolloutRequest, progress: Callable[[int], None] = lambda _: None
    ) -> list[Trajectory]:
        """Play the requested episodes; return their trajectories, failed ones too, item by item.
        A policy that shares a device with the learner is woken before and put to sleep afterwards.
        The canary may take texts from the trajectories, see `Canary.take`.
        progress: called with 1 for each finished episode.
        Errors: RolloutError if too many episodes failed, see `agentgym.rollouts.collect.collect`.
        """
        rollout = self.cfg.rollout
        if shares_device(self.cfg):
            self.loop.run(self.policy.wake())
        trajectories = self.loop.run(
            collect(
                samples(request.items, request.num_samples),
                pool=self.pool,
                player_of=token_players(self.policy, self.checkpoint.renderer),
                settings=request.settings(self.cfg, self.instructions),
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

    def publish(self, learner: Any, version: int) -> float:
        """Copy the learner's weights to the policy, as this version, and check that they arrived.
        Return the root mean square difference of their log-probabilities, in nats.
        learner: a `LocalLearner`.
        Errors: EngineMismatch; ValueError if the version does not grow or the weights do not fit.
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
        return self.loop.run(self.policy.usage())


def shares_device(cfg: RunConfig) -> bool:
    """Return True if an engine sleeps between rollouts, to leave its memory to the learner.
    It does if `compute` is not "ray", or if Ray may place a learner's rank and a rollout worker on
    one GPU, because each uses a fraction of a GPU. With `rollout.max_staleness` above 0 it never
    sleeps, because it samples while the learner updates.
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
    is_half = engine_dtype(cfg, checkpoint.dtype).itemsize < 4
    return Canary(checkpoint.tokenizer, limit, takes_text=is_half)


def episode_settings(
    cfg: RunConfig, *, instructions: Mapping[str, str], **collection: Any
) -> EpisodeSettings:
    """Return settings of episodes: token limits and action format are those of the configuration.
    instructions: by environment. collection: the other fields of `EpisodeSettings`.
    """
    return EpisodeSettings(
        max_new_tokens=cfg.rollout.max_new_tokens,
        context_tokens=cfg.model.context_tokens,
        instructions=instructions,
        action_format=cfg.rollout.action_format,
        engine_logprobs=cfg.rollout.engine_logprobs,
        **collection,
    )


def openings(cfg: RunConfig, guides: Mapping[str, Guide]) -> dict[str, str]:
    """Return environment -> instructions and worked examples that its episodes begin with.
    Empty without `rollout.instructions`: episodes then begin with the observation.
    guides: by environment. Errors: ConfigError if one offers too few worked examples.
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
    """Yield an engine; after the block, cancel its running episodes and close it. It may take over
    the checkpoint's model, not copied. version: number of the checkpoint's weights.
    Errors: those of `open_policy`; those of `EnvPools.check` if a server is unfit for training.
    """
    with open_pool(cfg, endpoints, allow_expert=False) as (pool, loop, guides):
        policy = open_policy(cfg, checkpoint, num_slots=cfg.rollout.concurrency, version=version)
        try:
            yield LocalEngine(cfg, checkpoint, policy, pool, loop, openings(cfg, guides))
        finally:
            loop.cancel()  # abandoned rollouts
            loop.run(policy.close())


def open_policy(cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Policy:
    """Open the policy that `rollout.engine` names; vLLM has its own process, started if necessary.
    The policy may take over the checkpoint's model, not copied.
    num_slots: episodes played at a time. version: number of the checkpoint's weights.
    Errors: ConfigError; those of the engine.
    """
    if cfg.rollout.engine not in HOSTED:
        return open_here(cfg, checkpoint, num_slots=num_slots, version=version)
    from agentgym.rollouts.policies.on_host import open_on_host

    tolerance_of(cfg, checkpoint.dtype)
    return open_on_host(cfg, checkpoint, num_slots=num_slots, version=version)


@contextmanager
def open_pool(
    cfg: RunConfig, endpoints: Endpoints, *, allow_expert: bool
) -> Iterator[tuple[EnvPools, LoopThread, dict[str, Guide]]]:
    """Yield (pool, its event loop, environment -> guide) once the servers passed
    `EnvPools.check`. After the block, cancel the loop's tasks, close pool and loop.
    allow_expert: accept servers that offer their expert. Errors: those of `EnvPools.check`.
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


CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """An event loop in its own thread; any thread may run coroutines in it, several at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        set_threads()  # torch keeps this setting per thread
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupted wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Cancel all tasks and wait for their end. Errors: TimeoutError after CLOSE_TIMEOUT_S."""

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S)

        self.run(finish())

    def close(self) -> None:
        """Cancel all tasks and end the thread; wait at most CLOSE_TIMEOUT_S for each.
        Errors: TimeoutError if a task does not end. A thread that does not end is left running.
        """
        try:
            self.cancel()
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()


STALE_SHARE = 0.1  # share of the limit; a smaller change of the learner may be noise
NUM_TEXTS, TEXT_TOKENS = 4, 128  # trajectories that the canary also scores, and tokens of each

# Share of the learner's change that must have arrived: 1 if the weights are the learner's, 0 if
# they are the old ones, 0.5 to 0.7 if half of the tensors were taken (SmolLM2-135M, bfloat16).
# It is judged only if the change is at least CHANGE_TO_NOISE times the earlier gap between engine
# and learner (rounding then hides 6 % of it) and if the estimate's standard error is small.
ARRIVED, CHANGE_TO_NOISE, STANDARD_ERROR = 0.75, 4.0, 1 / 16


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Log-probabilities [N] of one comparison, by the learner (ours) and the engine (theirs)."""

    ours: Tensor
    theirs: Tensor
    gap: float  # nats, root mean square of their difference


class Canary:
    """A check after each publish that the engine has the learner's weights: both must give the same
    log-probabilities to a few token sequences, see `compare`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: float, takes_text: bool = False
    ) -> None:
        """Build the fixed sequences.
        limit: largest root mean square difference, nats; see `agentgym.models.fidelity`.
        takes_text: score the run's own text, too, because an update changes its scores most. In
        half precision, changes on any other text are smaller than rounding.
        """
        self._limit, self._takes_text, self._is_half = limit, takes_text, takes_text
        self._digest, self.sequences = "", canary_sequences(tokenizer)

    def sent(self, digest: str, version: int) -> None:
        """Remember the digest of published weights. Log if it equals the one before: no comparison
        can then show that the weights arrived.
        """
        if digest == self._digest:
            logger.log(
                logging.WARNING if self._is_half else logging.INFO,
                "weights version %d changes no stored bit: no update was made, or one that is"
                " smaller than their dtype keeps (optimizer.lr, model.dtype)",
                version,
            )
        self._digest = digest

    def take(self, trajectories: Sequence[Trajectory]) -> None:
        """Extend `sequences` by the first tokens of NUM_TEXTS trajectories, once, if `takes_text`.
        Later calls, and calls without trajectories, do nothing.
        """
        if self._takes_text and trajectories:
            first = trajectories[:NUM_TEXTS]
            texts = [list(trajectory.input_ids[:TEXT_TOKENS]) for trajectory in first]
            # a new list: a publish in another thread may still use the old one
            self.sequences = self.sequences + [text for text in texts if len(text) > 1]
            self._takes_text = False

    def score(self, learner: Any, sequences: list[list[int]] | None = None) -> Tensor:
        """Return the learner's log-probabilities [N] of every token but each sequence's first.
        sequences: token ids; None for the present `sequences`.
        """
        sequences = self.sequences if sequences is None else sequences
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        starts = torch.cumsum(torch.tensor([0, *map(len, sequences)]), 0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[starts[:-1]] = False
        zeros, groups = torch.zeros(len(tokens)), torch.zeros(len(sequences), dtype=torch.int64)
        scores: Tensor = learner.score(
            Batch(tokens, starts, mask, zeros, zeros, groups, groups.bool(), 1.0)
        )
        return scores[mask]

    def compare(
        self,
        ours: Tensor,
        theirs: list[Tensor],
        version: int,
        engine: str = "the engine",
        before: EngineComparison | None = None,
    ) -> EngineComparison:
        """Compare the scores of learner and engine after a publish; return the comparison.
        If the engine's scores are those of `before` and the learner's changed little, the result
        has the `ours` of `before`, so that small changes add up.
        ours: [N] of the learner. theirs: N of the engine, in pieces. engine: its name in errors.
        before: the result of an earlier call. With None, or another N, only the limit is checked.
        Errors: EngineMismatch if the scores differ by more than the limit, which allows for the
        noise of the engine's kernels; if the learner's scores changed and the engine's are those
        of before; if the engine's scores followed only a part of the learner's change.
        """
        whole = torch.cat(theirs)
        comparison = EngineComparison(ours, whole, _rms(ours - whole))
        if not comparison.gap <= self._limit:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine}: canary prompts differ by"
                f" {comparison.gap:.3g} nats (limit {self._limit:g})"
            )
        if before is None or len(before.ours) != len(ours):
            return comparison
        if torch.equal(before.theirs, comparison.theirs):
            change = float((before.ours - ours).abs().max())
            if change > STALE_SHARE * self._limit:
                raise EngineMismatch(
                    f"weights version {version} did not reach {engine}: it scores canary prompts as"
                    f" before to the bit, the learner by up to {change:.3g} nats otherwise"
                )
            return replace(comparison, ours=before.ours)  # so that small changes add up
        share = arrived_share(before, comparison)
        if share is not None and not share >= ARRIVED:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine} as a whole: canary prompts moved"
                f" by {share:.0%} of the learner's change (at least {ARRIVED:.0%})"
            )
        return comparison


def arrived_share(before: EngineComparison, after: EngineComparison) -> float | None:
    """Return the share of the learner's change that the engine followed: a least-squares estimate.
    None if the change is too small, or the estimate too uncertain, to judge.
    """
    change, followed = after.ours - before.ours, after.theirs - before.theirs
    square = float(change.square().sum())
    if not square or _rms(change) < CHANGE_TO_NOISE * before.gap:
        return None
    share = float((followed * change).sum()) / square
    error = _rms(followed - share * change) / math.sqrt(square)
    return share if error <= STANDARD_ERROR else None


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def canary_sequences(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return four sequences of 16 token ids; they depend on the size of the vocabulary alone."""
    size = len(tokenizer)
    return [
        [(7 * sequence + 13 * column) % size for column in range(1, 17)] for sequence in range(4)
    ]
