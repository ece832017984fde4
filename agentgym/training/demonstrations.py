"""The episodes that training imitates, an expert's or recorded ones, played on train items.

They are stored as text; a model's tokenizer gives their tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from agentgym.config import RunConfig
from agentgym.data.items import Splits, interleave, splits_from_json
from agentgym.data.trajectories import RECORDED, Recorded, chosen, decode
from agentgym.records import DEMOS, decode_trajectories, encode_trajectories
from agentgym.rollouts.collect import collect
from agentgym.rollouts.engine import episode_settings, open_pool, openings
from agentgym.rollouts.episode import (
    Episode,
    EpisodeSettings,
    Player,
    PlayerOf,
    PlayerReply,
    extract_action,
    reply_naming,
)
from agentgym.rollouts.players import ExpertPlayer, ScriptedPlayer
from agentgym.steps.context import StepContext
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.types import Completion, Endpoints, Item, Trajectory

if TYPE_CHECKING:
    from agentgym.models.chat import ChatRenderer

INSTRUCTIONS = "instructions.json"  # opening text of episodes, by environment


def record_demonstrations(ctx: StepContext) -> Manifest:
    """Play the demonstrations and commit them, including failed ones.

    A tokenizer is trained on all of them, and dpo compares with the failed ones.
    Errors: RolloutError; ValueError if none succeeded in an environment.
    """
    cfg = ctx.cfg
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    is_expert = cfg.warm_start.source == "expert"
    played, settings = _played(ctx, splits)
    _require_success(
        cfg, played, "the expert of {} solved" if is_expert else "the trajectories of {} solve"
    )
    num_solved = sum(episode.success for episode in played)
    return ctx.commit(
        done=True,
        state={},
        blobs={
            DEMOS: encode_trajectories(map(_without_clocks, played)),
            INSTRUCTIONS: json.dumps(settings.instructions, sort_keys=True).encode(),
        },
        results={
            "num_played": len(played),
            "num_demos": num_solved,
            "expert_success": num_solved / len(played),
        },
    )


def tokenized_demonstrations(
    cfg: RunConfig, store: RunStore, recorded: Manifest, renderer: ChatRenderer
) -> list[Trajectory]:
    """Return a commit's demonstrations with the tokens of this renderer.

    Failed ones are included. Recorded trajectories that do not fit model.context_tokens are left
    out. Errors: ValueError if an environment has no success among those that fit.
    """
    settings = demonstration_settings(cfg, json.loads(store.read(recorded, INSTRUCTIONS)))
    played = decode_trajectories(store.read(recorded, DEMOS))
    demos = [tokenized(episode, renderer, settings) for episode in played]
    if cfg.warm_start.source == "trajectories":
        demos = [demo for demo in demos if len(demo.input_ids) <= cfg.model.context_tokens]
        _require_success(cfg, demos, "of trajectories that fit model.context_tokens, {}'s solve")
    return demos


def _played(ctx: StepContext, splits: Splits) -> tuple[list[Trajectory], EpisodeSettings]:
    """Play the demonstrations; return them with the settings for their tokens.

    An expert that gives up has no success. Errors: RolloutError.
    """
    cfg, rollout = ctx.cfg, ctx.cfg.rollout
    is_expert = cfg.warm_start.source == "expert"
    script: dict[tuple[Item, int], list[PlayerReply]] = {}
    if is_expert:
        title, slots = "expert demonstrations", [(item, 0) for item in expert_items(cfg, splits)]
    else:
        title = "trajectories played again"
        recorded = recorded_for(cfg, decode(ctx.read(ctx.data, RECORDED)))
        for sample, trajectory in enumerate(recorded):
            script[trajectory.item, sample] = replies_of(trajectory, rollout.action_format)
        slots = list(script)
    ctx.progress.start(title, len(slots))

    def player_of(item: Item, sample: int) -> Player:
        return ExpertPlayer() if is_expert else ScriptedPlayer(script[item, sample])

    with ctx.environment(is_expert) as endpoints:
        return demonstrate(
            cfg, endpoints, slots, player_of, allow_expert=is_expert, progress=ctx.progress.advance
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
    """Play each (item, sample) to its end; return the episodes with the settings for tokens.

    The player or the environment ends an episode. Errors: RolloutError for a failed episode.
    """
    rollout = cfg.rollout
    with open_pool(cfg, endpoints, allow_expert=allow_expert) as (pool, loop, guides):
        settings = demonstration_settings(cfg, openings(cfg, guides))
        played = loop.run(
            collect(
                shown,
                pool=pool,
                player_of=player_of,
                settings=settings,
                concurrency=rollout.concurrency,
                episode_timeout_s=rollout.episode_timeout_s,
                max_attempts=rollout.max_attempts,
                # a missing demonstration would change the training data
                max_env_error_frac=0.0,
                progress=progress,
            )
        )
        return played, settings


def demonstration_settings(cfg: RunConfig, instructions: Mapping[str, str]) -> EpisodeSettings:
    """Return settings to tokenize demonstrations. instructions: opening text, by environment."""
    others = {"seed": cfg.seed, "step": 0, "max_turns": sys.maxsize, "temperature": 1.0}
    return episode_settings(cfg, instructions=instructions, **others)


def _without_clocks(played: Trajectory) -> Trajectory:
    """Return the episode without times, with num_attempts 1 and with its length as horizon,
    so that equal runs store equal bytes.
    """
    turns = tuple(replace(turn, generate_s=0.0, env_s=0.0) for turn in played.turns)
    return replace(played, turns=turns, max_turns=max(1, len(turns)), timing={}, num_attempts=1)


def _require_success(cfg: RunConfig, demos: Sequence[Trajectory], subject: str) -> None:
    """Raise ValueError for an environment without success. subject: begins the message, with {}
    for the environment's name.
    """
    for env in cfg.envs:
        of_env = [demo for demo in demos if demo.item.env == env.name]
        if not any(demo.success for demo in of_env):
            raise ValueError(
                f"{subject.format(env.name)} none of {len(of_env)} tasks; nothing to start from."
                " Check its options"
            )


def expert_items(cfg: RunConfig, splits: Splits) -> list[Item]:
    """Return the train items that an expert plays: the first num_demos in a seeded order."""
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, 1])).permutation(len(splits.train))
    items = interleave([splits.train[index] for index in order], cfg.env_weights)
    return items[: cfg.warm_start.num_demos]


def recorded_for(cfg: RunConfig, recorded: Sequence[Recorded]) -> list[Recorded]:
    """Return the recorded trajectories that a run replays, in order; their index is the sample."""
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, 1])).permutation(
        len({trajectory.item for trajectory in recorded})
    )
    return chosen(recorded, cfg.env_weights, order.tolist(), cfg.warm_start.num_demos)


def tokenized(played: Trajectory, renderer: ChatRenderer, settings: EpisodeSettings) -> Trajectory:
    """Return the episode with the tokens of this renderer, as if a policy had sampled its replies.
    Log-probabilities and times are 0.
    """
    settings = replace(settings, max_turns=max(1, len(played.turns)))
    episode = Episode(
        played.item, played.sample, settings, played.first_observation, success=played.success
    )
    instructions = settings.instructions_of(played.item)
    episode.read(renderer.start(played.first_observation, instructions))
    for index, turn in enumerate(played.turns):
        reply_text = turn.reply or reply_naming(turn.action, settings.action_format)
        ids = tuple(renderer.action_ids(reply_text))
        start = len(episode.input_ids)
        episode.act(Completion(ids, (0.0,) * len(ids), "stop", 0))
        episode.turns.append(
            replace(turn, start=start, end=len(episode.input_ids), generate_s=0.0, env_s=0.0)
        )
        if index + 1 < len(played.turns):
            episode.read(renderer.bridge(turn.observation, stopped=True))
    return replace(episode.finish(played.status), timing={})


def replies_of(recorded: Recorded, action_format: Literal["plain", "react"]) -> list[PlayerReply]:
    """Return replies for replay: whole react replies if action_format is react, else actions."""
    replies = []
    for reply in map(str.strip, recorded.replies):
        action = extract_action(reply, "react") if "Action:" in reply else reply
        whole = action_format == "react" and "Action:" in reply
        replies.append(PlayerReply(reply if whole else action, action))
    return replies
