"""The start of training: expert demonstrations, a model, and supervised learning of the one from the other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.context import StepContext, decode_trajectories, encode_trajectories, now_ms
from agentgym.data import interleave, splits_from_json
from agentgym.rollouts.chat import ChatRenderer
from agentgym.rollouts.client import EnvError, EnvPools
from agentgym.rollouts.episode import Episode, EpisodeSettings, ending, reply_naming
from agentgym.store.manifest import Manifest
from agentgym.tracking import Point
from agentgym.training.checkpoint import OPTIMISER, WEIGHTS, load_checkpoint, new_checkpoint
from agentgym.training.compute import LearnerPlan, open_learner
from agentgym.training.engine import open_pool
from agentgym.training.model import load_hub, new_model, set_threads, train_tokenizer
from agentgym.types import Completion, Item, Status, Trajectory, Turn

DEMOS = "demos.jsonl.gz"
COMMIT_EVERY = 20  # optimiser steps


def initialise(ctx: StepContext) -> Manifest:
    """Expert demonstrations of train items, and the model before any training."""
    set_threads()
    cfg = ctx.cfg
    splits = splits_from_json(ctx.read(ctx.parents["prepare"], "splits.json"))
    texts: list[_TextEpisode] = []
    manuals: dict[str, str] = {}
    if cfg.warm_start.enabled:
        order = np.random.Generator(np.random.Philox(key=[cfg.seed, 1])).permutation(len(splits.train))
        items = interleave([splits.train[index] for index in order], cfg.weights)[: cfg.warm_start.num_demos]
        ctx.progress.start("expert demonstrations", len(items))
        with ctx.environment(True) as endpoints, open_pool(cfg, endpoints, allow_expert=True) as (pool, loop, manuals):
            texts = loop.run(_demonstrate(pool, items, cfg.rollout.concurrency, cfg.rollout.episode_timeout_s, ctx.progress.advance))
    if cfg.model.source == "hub":
        model, tokenizer = load_hub(cfg.model)
    else:
        if not texts:
            raise ValueError("model.source tiny trains its tokenizer on demonstrations; set warm_start.enabled or use model.source hub")
        # each distinct text once per occurrence keeps frequent words whole
        tokenizer = train_tokenizer((text for episode in texts for text in episode.texts()), cfg.model.vocab_size)
        model = new_model(cfg.model, vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, seed=cfg.seed)
    checkpoint = new_checkpoint(model, tokenizer)
    demos = [episode.tokenise(checkpoint.renderer, _settings(ctx, manuals)) for episode in texts]
    success = sum(demo.success for demo in demos) / len(demos) if demos else 0.0
    for env in cfg.envs if demos else ():
        own = [demo for demo in demos if demo.item.env == env.name]
        if not any(demo.success for demo in own):
            raise ValueError(f"the expert of {env.name} solved none of {len(own)} tasks; nothing to start from. Check its options")
    return ctx.commit(
        done=True,
        state={"global_step": 0},
        blobs={**checkpoint.blobs(), DEMOS: encode_trajectories([demo for demo in demos if demo.success])},
        results={
            "num_demos": sum(demo.success for demo in demos),
            "expert_success": success,
            "vocab_size": len(tokenizer),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
    )


def warm_start(ctx: StepContext) -> Manifest:
    """Supervised learning on the demonstrations' action tokens; stands in for a pretrained model."""
    set_threads()
    settings = ctx.cfg.warm_start
    start = ctx.head or ctx.parents["initialise"]
    demos = decode_trajectories(ctx.read(ctx.parents["initialise"], DEMOS))
    checkpoint = load_checkpoint(ctx.store, start)
    step = int(start.state.get("sft_step", 0))
    plan = LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.read(start, WEIGHTS),
        optimiser=settings.optimiser,
        total_steps=settings.steps,
        optimiser_states={OPTIMISER: ctx.read(start, OPTIMISER)} if OPTIMISER in start.blobs else {},
    )
    ctx.progress.start("warm start", settings.steps)
    ctx.progress.advance(step)
    points: list[Point] = []
    with open_learner(ctx.cfg, plan) as learner:
        while step < settings.steps:
            step += 1
            metrics = learner.supervised(
                to_batch([demos[index] for index in demo_rows(ctx.cfg.seed, step, len(demos), settings.batch_size)]),
                step=step,
            )
            points.append(Point(step, now_ms(), metrics))
            ctx.progress.advance(1, f"loss {metrics['sft/loss']:.2f}")
            if step % COMMIT_EVERY == 0 or step == settings.steps:
                manifest = ctx.commit(
                    done=step == settings.steps,
                    state={"global_step": 0, "sft_step": step},
                    blobs={**checkpoint.files(), **learner.blobs()},
                    results={"loss": metrics["sft/loss"]},
                    points=points,
                )
                points = []
    return manifest


def demo_rows(seed: int, step: int, num_demos: int, batch_size: int) -> list[int]:
    """Which demonstrations optimiser step 1, 2, ... learns from: epochs of seeded shuffles, a pure function of the step."""
    first = (step - 1) * batch_size
    rows: list[int] = []
    while len(rows) < batch_size:
        epoch, offset = divmod(first + len(rows), num_demos)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch + 1_000_000])).permutation(num_demos)
        rows += order[offset : offset + batch_size - len(rows)].tolist()
    return rows


class _TextEpisode:
    """A demonstration before there is a tokenizer."""

    def __init__(self, item: Item, observation: str) -> None:
        self.item, self.first_observation = item, observation
        self.steps: list[tuple[str, str, float]] = []  # action, observation, reward
        self.status, self.success = Status.TERMINATED, False

    def texts(self) -> list[str]:
        return [self.first_observation, *(text for action, observation, _ in self.steps for text in (action, observation))]

    def tokenise(self, renderer: ChatRenderer, settings: EpisodeSettings) -> Trajectory:
        """The ids a policy would have produced, had it played this."""
        settings = replace(settings, max_turns=max(1, len(self.steps)))
        episode = Episode(self.item, 0, settings, self.first_observation, success=self.success, timing={})
        episode.read(renderer.start(self.first_observation, settings.manual(self.item)))
        for index, (action, observation, reward) in enumerate(self.steps):
            ids = tuple(renderer.action_ids(reply_naming(action, settings.action_format)))
            start = len(episode.input_ids)
            episode.act(Completion(ids, (0.0,) * len(ids), "stop", 0))
            episode.turns.append(Turn(action, observation, reward, start, len(episode.input_ids), 0))
            if index + 1 < len(self.steps):
                episode.read(renderer.bridge(observation, stopped=True))
        return episode.finish(self.status)


def _settings(ctx: StepContext, manuals: dict[str, str]) -> EpisodeSettings:
    rollout = ctx.cfg.rollout
    return EpisodeSettings(
        seed=ctx.cfg.seed,
        step=0,
        max_turns=1,
        temperature=1.0,
        max_new_tokens=rollout.max_new_tokens,
        context_tokens=ctx.cfg.model.context_tokens,
        manuals=manuals,
        action_format=rollout.action_format,
    )


async def _demonstrate(
    pool: EnvPools, items: Sequence[Item], concurrency: int, timeout_s: float, progress: Callable[[int], None]
) -> list[_TextEpisode]:
    """One expert episode of each item, in the items' order; where the expert gives up it ends without success.

    Errors: EnvError, TimeoutError.
    """
    nonce = uuid.uuid4().hex
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Item) -> _TextEpisode:
        async with slots, asyncio.timeout(timeout_s), pool.session(item, f"{nonce}-{item.item_id}") as session:
            episode = _TextEpisode(item, session.observation)
            while True:
                try:
                    action = await session.expert()
                except EnvError as error:
                    if error.kind != "expert_failed":
                        raise
                    progress(1)  # a task beyond the expert: counted, not learned from
                    return episode
                reply = await session.step(action)
                episode.steps.append((action, reply.observation, reply.reward))
                ended = ending(reply)
                if ended is not None:
                    episode.status, episode.success = ended, reply.success
                    progress(1)
                    return episode

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item)) for item in items]
    return [task.result() for task in tasks]
