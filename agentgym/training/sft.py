"""The start of training: expert demonstrations, a model, and supervised learning of the one
from the other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.compute.placement import open_learner
from agentgym.config import RunConfig
from agentgym.data.items import Splits, interleave, splits_from_json
from agentgym.data.trajectories import RECORDED, Recorded, chosen, decode
from agentgym.learner.plan import LearnerPlan
from agentgym.models.chat import ChatRenderer
from agentgym.models.checkpoint import (
    OPTIMIZER,
    Checkpoint,
    load_checkpoint,
    new_checkpoint,
)
from agentgym.models.model import load_hub, new_model, set_threads, train_tokenizer
from agentgym.records import decode_trajectories, encode_trajectories
from agentgym.rollouts.collect import collect
from agentgym.rollouts.engine import episode_settings, open_pool, openings
from agentgym.rollouts.episode import (
    Episode,
    EpisodeSettings,
    Player,
    Said,
    extract_action,
    reply_naming,
)
from agentgym.rollouts.players import ExpertPlayer, PlayerOf, ScriptedPlayer
from agentgym.steps.context import StepContext, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.training.speed import clock_of
from agentgym.types import Completion, Endpoints, Item, Trajectory

logger = logging.getLogger(__name__)

DEMOS = "demos.jsonl.gz"
COMMIT_EVERY = 20  # optimizer steps


def initialize(ctx: StepContext) -> Manifest:
    """Demonstrations of train items, an expert's or others', and the model before any training."""
    set_threads(ctx.cfg.compute_threads)
    cfg = ctx.cfg
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    is_expert = cfg.warm_start.source == "expert"
    played, settings = _played(ctx, splits) if cfg.warm_start.enabled else ([], None)
    checkpoint = first_checkpoint(cfg, played)
    notes = checkpoint.renderer.notes
    for note in notes:
        logger.warning("%s", note)
    demos = [tokenized(each, checkpoint.renderer, settings) for each in played if settings]
    if not is_expert:
        demos = [demo for demo in demos if len(demo.input_ids) <= cfg.model.context_tokens]
    if played:
        _require_success(cfg, demos)
    num_solved = sum(demo.success for demo in demos)
    # dpo compares with what failed, too
    kept = [demo for demo in demos if demo.success or not is_expert]
    return ctx.commit(
        done=True,
        state={"global_step": 0},
        blobs={**checkpoint.files(), DEMOS: encode_trajectories(kept)},
        snapshot=checkpoint.snapshot(),
        results={
            "num_demos": num_solved,
            "expert_success": num_solved / len(demos) if demos else 0.0,
            "vocab_size": len(checkpoint.tokenizer),
            "num_parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
            **({"conversation": list(notes)} if notes else {}),
            **(
                {}
                if is_expert
                else {"num_played": len(played), "num_too_long": len(played) - len(demos)}
            ),
        },
    )


def _played(ctx: StepContext, splits: Splits) -> tuple[list[Trajectory], EpisodeSettings]:
    """Demonstrations, and the settings their tokens are made under. An expert that gives up has no
    success. Errors: RolloutError.
    """
    cfg, rollout = ctx.cfg, ctx.cfg.rollout
    is_expert = cfg.warm_start.source == "expert"
    script: dict[tuple[Item, int], list[Said]] = {}
    if is_expert:
        title, shown = "expert demonstrations", [(item, 0) for item in expert_items(cfg, splits)]
    else:
        title = "trajectories played again"
        recorded = recorded_for(cfg, decode(ctx.read(ctx.data, RECORDED)))
        for sample, each in enumerate(recorded):
            script[each.item, sample] = replies_of(each, rollout.action_format)
        shown = list(script)
    ctx.progress.start(title, len(shown))

    def player_of(item: Item, sample: int) -> Player:
        return ExpertPlayer() if is_expert else ScriptedPlayer(script[item, sample])

    with ctx.environment(is_expert) as endpoints:
        return demonstrate(
            cfg, endpoints, shown, player_of, allow_expert=is_expert, progress=ctx.progress.advance
        )


def demonstrate(
    cfg: RunConfig,
    endpoints: Endpoints,
    shown: Sequence[tuple[Item, int]],
    player_of: PlayerOf,
    *,
    allow_expert: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[list[Trajectory], EpisodeSettings]:
    """Each (item, sample) played by its player until it or the environment ends the episode, and
    the settings that tokens of it are made under. Errors: RolloutError for a failed episode.
    """
    rollout = cfg.rollout
    with open_pool(cfg, endpoints, allow_expert=allow_expert) as (pool, loop, guides):
        settings = episode_settings(
            cfg,
            instructions=openings(cfg, guides),
            seed=cfg.seed,
            step=0,
            max_turns=sys.maxsize,
            temperature=1.0,
        )
        played = loop.run(
            collect(
                shown,
                pool=pool,
                player_of=player_of,
                settings=settings,
                concurrency=rollout.concurrency,
                episode_timeout_s=rollout.episode_timeout_s,
                max_attempts=rollout.max_attempts,
                max_env_error_frac=0.0,  # a demonstration left out would change what is learned
                progress=progress,
            )
        )
        return played, settings


def first_checkpoint(cfg: RunConfig, played: Sequence[Trajectory]) -> Checkpoint:
    """The model before any training, with its tokenizer; a tiny one's is trained on these
    episodes. Errors: ValueError where there are none to do so.
    """
    if cfg.model.source == "hub":
        return new_checkpoint(*load_hub(cfg.model), cfg.model.chat)
    if not played:
        raise ValueError(
            "model.source tiny trains its tokenizer on demonstrations; set warm_start.enabled"
            " or use model.source hub"
        )
    # each distinct text once per occurrence keeps frequent words whole
    words = (text for episode in played for text in texts_of(episode))
    tokenizer = train_tokenizer(words, cfg.model.vocab_size)
    model = new_model(
        cfg.model,
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=cfg.seed,
    )
    return new_checkpoint(model, tokenizer, cfg.model.chat)


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
        demo for demo in decode_trajectories(ctx.read(ctx.demonstrations, DEMOS)) if demo.success
    ]


def warm_start(ctx: StepContext) -> Manifest:
    """Supervised learning on the demonstrations' action tokens; stands in for a pretrained
    model.
    """
    set_threads(ctx.cfg.compute_threads)
    settings = ctx.cfg.warm_start
    start = ctx.head or ctx.checkpoint
    demos = demonstrations(ctx)
    checkpoint = load_checkpoint(ctx.store, start)
    step = int(start.state.get("sft_step", 0))
    plan = LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.policy(start),
        adapter=ctx.adapter(start) if ctx.cfg.adapts_warm_start else None,
        optimizer=settings.optimizer,
        settings=ctx.cfg.learner,
        total_steps=settings.steps,
        optimizer_states=ctx.tensors_of(start, OPTIMIZER),
    )
    ctx.progress.start("warm start", settings.steps)
    ctx.progress.advance(step)
    points: list[Point] = []
    with open_learner(ctx.cfg, plan) as learner:
        clock = clock_of(ctx.cfg, learner)
        while step < settings.steps:
            step += 1
            clock.lap("commit")  # of the step before
            indices = demo_indices(ctx.cfg.seed, step, len(demos), settings.batch_size)
            batch = to_batch([demos[index] for index in indices])
            metrics = learner.sft_step(batch, step=step)
            clock.lap("update")
            metrics |= clock.step(batch.num_tokens, metrics)
            points.append(Point(step, now_ms(), metrics))
            ctx.progress.advance(1, f"loss {metrics['sft/loss']:.2f}")
            if step % COMMIT_EVERY == 0 or step == settings.steps:
                manifest = ctx.step_taken(
                    step,
                    done=step == settings.steps,
                    state={"global_step": 0, "sft_step": step},
                    files={**checkpoint.files(), **plan.files()},
                    snapshot=learner.snapshot,
                    results={"loss": metrics["sft/loss"]},
                    points=points,
                )
                points = []
    assert manifest is not None  # of the last step
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


def tokenized(played: Trajectory, renderer: ChatRenderer, settings: EpisodeSettings) -> Trajectory:
    """With the ids a policy would have produced, had it played this; without the times."""
    settings = replace(settings, max_turns=max(1, len(played.turns)))
    episode = Episode(
        played.item, played.sample, settings, played.first_observation, success=played.success
    )
    instructions = settings.instructions_of(played.item)
    episode.read(renderer.start(played.first_observation, instructions))
    for index, turn in enumerate(played.turns):
        said = turn.reply or reply_naming(turn.action, settings.action_format)
        ids = tuple(renderer.action_ids(said))
        start = len(episode.input_ids)
        episode.act(Completion(ids, (0.0,) * len(ids), "stop", 0))
        episode.turns.append(
            replace(turn, start=start, end=len(episode.input_ids), generate_s=0.0, env_s=0.0)
        )
        if index + 1 < len(played.turns):
            episode.read(renderer.bridge(turn.observation, stopped=True))
    return replace(episode.finish(played.status), timing={})


def texts_of(played: Trajectory) -> list[str]:
    """All that was said in an episode."""
    return [
        played.first_observation,
        *(text for turn in played.turns for text in (turn.reply or turn.action, turn.observation)),
    ]


def replies_of(recorded: Recorded, action_format: Literal["plain", "react"]) -> list[Said]:
    """With react what was said as it is; else the action alone, of whatever format it came in."""
    said = []
    for reply in map(str.strip, recorded.replies):
        action = extract_action(reply, "react") if "Action:" in reply else reply
        whole = action_format == "react" and "Action:" in reply
        said.append(Said(reply if whole else action, action))
    return said
