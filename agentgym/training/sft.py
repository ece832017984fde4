"""The start of training: expert demonstrations, a model, and supervised learning of the one
from the other.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.compute.placement import open_learner
from agentgym.config import RunConfig
from agentgym.data.items import Splits, interleave, splits_from_json
from agentgym.data.trajectories import RECORDED, Recorded, chosen, decode
from agentgym.learner.plan import LearnerPlan
from agentgym.models.chat import ChatRenderer
from agentgym.models.checkpoint import OPTIMIZER, WEIGHTS, load_checkpoint, new_checkpoint
from agentgym.models.model import load_hub, new_model, set_threads, train_tokenizer
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.engine import open_pool
from agentgym.rollouts.episode import Episode, EpisodeSettings, ending, extract_action, reply_naming
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.context import StepContext, decode_trajectories, encode_trajectories, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.types import Completion, Item, Status, Trajectory, Turn

DEMOS = "demos.jsonl.gz"
COMMIT_EVERY = 20  # optimizer steps


def initialize(ctx: StepContext) -> Manifest:
    """Demonstrations of train items, an expert's or others', and the model before any training."""
    set_threads()
    cfg = ctx.cfg
    splits = splits_from_json(ctx.read(ctx.parents["prepare"], "splits.json"))
    is_expert = cfg.warm_start.source == "expert"
    texts, instructions = _played(ctx, splits) if cfg.warm_start.enabled else ([], {})
    if cfg.model.source == "hub":
        model, tokenizer = load_hub(cfg.model)
    else:
        if not texts:
            raise ValueError(
                "model.source tiny trains its tokenizer on demonstrations; set warm_start.enabled"
                " or use model.source hub"
            )
        # each distinct text once per occurrence keeps frequent words whole
        tokenizer = train_tokenizer(
            (text for episode in texts for text in episode.texts()), cfg.model.vocab_size
        )
        model = new_model(
            cfg.model,
            vocab_size=len(tokenizer),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            seed=cfg.seed,
        )
    checkpoint = new_checkpoint(model, tokenizer)
    demos = [
        episode.tokenize(checkpoint.renderer, _settings(ctx, instructions)) for episode in texts
    ]
    if not is_expert:
        demos = [demo for demo in demos if len(demo.input_ids) <= cfg.model.context_tokens]
    if texts:
        _require_success(cfg, demos)
    num_solved = sum(demo.success for demo in demos)
    # dpo compares with what failed, too
    kept = [demo for demo in demos if demo.success or not is_expert]
    return ctx.commit(
        done=True,
        state={"global_step": 0},
        blobs={**checkpoint.blobs(), DEMOS: encode_trajectories(kept)},
        results={
            "num_demos": num_solved,
            "expert_success": num_solved / len(demos) if demos else 0.0,
            "vocab_size": len(tokenizer),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            **(
                {}
                if is_expert
                else {"num_played": len(texts), "num_too_long": len(texts) - len(demos)}
            ),
        },
    )


def _played(ctx: StepContext, splits: Splits) -> tuple[list[_TextEpisode], dict[str, str]]:
    """(demonstrations, instructions by environment). Errors: as `_demonstrate`."""
    cfg = ctx.cfg
    is_expert = cfg.warm_start.source == "expert"
    players: list[_Player]
    if is_expert:
        title = "expert demonstrations"
        players = [_Expert(item) for item in expert_items(cfg, splits)]
    else:
        title = "trajectories played again"
        recorded = recorded_for(cfg, decode(ctx.read(ctx.parents["prepare"], RECORDED)))
        players = [
            _Replay(each, index, cfg.rollout.action_format) for index, each in enumerate(recorded)
        ]
    ctx.progress.start(title, len(players))
    with (
        ctx.environment(is_expert) as endpoints,
        open_pool(cfg, endpoints, allow_expert=is_expert) as (pool, loop, instructions),
    ):
        limits = (cfg.rollout.concurrency, cfg.rollout.episode_timeout_s)
        return loop.run(_demonstrate(pool, players, *limits, ctx.progress.advance)), instructions


def _require_success(cfg: RunConfig, demos: Sequence[Trajectory]) -> None:
    """Errors: ValueError naming an environment of which no demonstration succeeded."""
    for env in cfg.envs:
        own = [demo for demo in demos if demo.item.env == env.name]
        if not any(demo.success for demo in own):
            who = (
                f"the expert of {env.name} solved"
                if cfg.warm_start.source == "expert"
                else f"of trajectories that fit model.context_tokens, {env.name}'s solve"
            )
            raise ValueError(
                f"{who} none of {len(own)} tasks; nothing to start from. Check its options"
            )


def expert_items(cfg: RunConfig, splits: Splits) -> list[Item]:
    """The train items an expert shows."""
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, 1])).permutation(len(splits.train))
    return interleave([splits.train[index] for index in order], cfg.env_weights)[
        : cfg.warm_start.num_demos
    ]


def recorded_for(cfg: RunConfig, recorded: Sequence[Recorded]) -> list[Recorded]:
    """Those of them a run plays again, in its order.
    A trajectory's `sample` is its place among them.
    """
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, 1])).permutation(
        len({each.item for each in recorded})
    )
    return chosen(recorded, cfg.env_weights, order.tolist(), cfg.warm_start.num_demos)


def demonstrations(ctx: StepContext) -> list[Trajectory]:
    """The successful ones, to imitate."""
    return [
        demo
        for demo in decode_trajectories(ctx.read(ctx.parents["initialize"], DEMOS))
        if demo.success
    ]


def warm_start(ctx: StepContext) -> Manifest:
    """Supervised learning on the demonstrations' action tokens; stands in for a pretrained
    model.
    """
    set_threads()
    settings = ctx.cfg.warm_start
    start = ctx.head or ctx.parents["initialize"]
    demos = demonstrations(ctx)
    checkpoint = load_checkpoint(ctx.store, start)
    step = int(start.state.get("sft_step", 0))
    plan = LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.read(start, WEIGHTS),
        optimizer=settings.optimizer,
        total_steps=settings.steps,
        optimizer_states=(
            {OPTIMIZER: ctx.read(start, OPTIMIZER)} if OPTIMIZER in start.blobs else {}
        ),
    )
    ctx.progress.start("warm start", settings.steps)
    ctx.progress.advance(step)
    points: list[Point] = []
    with open_learner(ctx.cfg, plan) as learner:
        while step < settings.steps:
            step += 1
            metrics = learner.sft_step(
                to_batch(
                    [
                        demos[index]
                        for index in demo_indices(
                            ctx.cfg.seed, step, len(demos), settings.batch_size
                        )
                    ]
                ),
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


def demo_indices(seed: int, step: int, num_demos: int, batch_size: int) -> list[int]:
    """Which demonstrations optimizer step 1, 2, ... learns from: epochs of seeded shuffles, a
    pure function of the step.
    """
    first = (step - 1) * batch_size
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(first + len(indices), num_demos)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch + 1_000_000])).permutation(
            num_demos
        )
        indices += order[offset : offset + batch_size - len(indices)].tolist()
    return indices


class Step(NamedTuple):
    """One turn of a demonstration."""

    action: str
    observation: str
    reward: float
    # all that was said to take the action; empty: no more than the action format asks for
    reply: str = ""


class _TextEpisode:
    """A demonstration before there is a tokenizer."""

    def __init__(self, item: Item, observation: str, sample: int = 0) -> None:
        self.item, self.first_observation, self.sample = item, observation, sample
        self.steps: list[Step] = []
        self.status, self.success = Status.TERMINATED, False

    def texts(self) -> list[str]:
        return [
            self.first_observation,
            *(
                text
                for step in self.steps
                for text in (step.reply or step.action, step.observation)
            ),
        ]

    def tokenize(self, renderer: ChatRenderer, settings: EpisodeSettings) -> Trajectory:
        """The ids a policy would have produced, had it played this."""
        settings = replace(settings, max_turns=max(1, len(self.steps)))
        episode = Episode(
            self.item,
            self.sample,
            settings,
            self.first_observation,
            success=self.success,
            timing={},
        )
        episode.read(renderer.start(self.first_observation, settings.instructions_of(self.item)))
        for index, step in enumerate(self.steps):
            ids = tuple(
                renderer.action_ids(step.reply or reply_naming(step.action, settings.action_format))
            )
            start = len(episode.input_ids)
            episode.act(Completion(ids, (0.0,) * len(ids), "stop", 0))
            episode.turns.append(
                Turn(step.action, step.observation, step.reward, start, len(episode.input_ids), 0)
            )
            if index + 1 < len(self.steps):
                episode.read(renderer.bridge(step.observation, stopped=True))
        return episode.finish(self.status)


class _Player(Protocol):
    """Plays one demonstration."""

    item: Item
    sample: int

    async def next_reply(self, session: Any) -> tuple[str, str] | None:
        """(reply, action); an empty reply says no more than the action, None gives up.
        Errors: EnvError.
        """
        ...


class _Expert:
    """The environment's own."""

    sample = 0

    def __init__(self, item: Item) -> None:
        self.item = item

    async def next_reply(self, session: Any) -> tuple[str, str] | None:
        try:
            return "", await session.expert()
        except EnvError as error:
            if error.kind != "expert_failed":
                raise
            return None


class _Replay:
    """Somebody's recorded actions."""

    def __init__(
        self, recorded: Recorded, sample: int, action_format: Literal["plain", "react"]
    ) -> None:
        self.item, self.sample = recorded.item, sample
        self._replies = iter(replies_of(recorded, action_format))

    async def next_reply(self, session: Any) -> tuple[str, str] | None:
        return next(self._replies, None)


def replies_of(
    recorded: Recorded, action_format: Literal["plain", "react"]
) -> list[tuple[str, str]]:
    """(reply, action): with react what was said as it is; else the action alone, of whatever
    format it came in.
    """
    said = [
        (reply.strip(), extract_action(reply, "react") if "Action:" in reply else reply.strip())
        for reply in recorded.replies
    ]
    return [
        (reply if action_format == "react" and "Action:" in reply else "", action)
        for reply, action in said
    ]


def _settings(ctx: StepContext, instructions: dict[str, str]) -> EpisodeSettings:
    rollout = ctx.cfg.rollout
    return EpisodeSettings(
        seed=ctx.cfg.seed,
        step=0,
        max_turns=1,
        temperature=1.0,
        max_new_tokens=rollout.max_new_tokens,
        context_tokens=ctx.cfg.model.context_tokens,
        instructions=instructions,
        action_format=rollout.action_format,
    )


async def _demonstrate(
    pool: EnvPools,
    players: Sequence[_Player],
    concurrency: int,
    timeout_s: float,
    progress: Callable[[int], None],
) -> list[_TextEpisode]:
    """One episode of each player, in their order; where one gives up before the task ends, its
    episode has no success.

    Errors: EnvError, TimeoutError.
    """
    nonce = uuid.uuid4().hex
    slots = asyncio.Semaphore(concurrency)

    async def one(player: _Player) -> _TextEpisode:
        key = f"{nonce}-{player.item.item_id}-{player.sample}"
        async with slots, asyncio.timeout(timeout_s), pool.session(player.item, key) as session:
            episode = _TextEpisode(player.item, session.observation, player.sample)
            while True:
                said = await player.next_reply(session)
                if said is None:  # a task beyond the expert: counted, not learned from
                    episode.status = Status.MAX_TURNS
                    break
                answer = await session.step(said[1])
                episode.steps.append(Step(said[1], answer.observation, answer.reward, said[0]))
                ended = ending(answer)
                if ended is not None:
                    episode.status, episode.success = ended, answer.success
                    break
            progress(1)
            return episode

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(player)) for player in players]
    return [task.result() for task in tasks]
