"""One episode: tokens in, tokens out, append only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agentgym.models.chat import ChatRenderer
from agentgym.types import Completion, Item, Policy, SampleKey, Sampling, Status, Trajectory, Turn


class Reply(Protocol):
    """What an environment answers; `envs.wire.StepReply` is one."""

    @property
    def observation(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def success(self) -> bool: ...


class OpenSession(Protocol):
    """An open session of an environment; `agentgym.rollouts.pools.EnvSession` is one."""

    @property
    def observation(self) -> str: ...
    async def step(self, action: str) -> Reply: ...


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What is equal for all episodes of one collection."""

    seed: int
    step: int  # optimizer step the episodes are for
    max_turns: int
    temperature: float
    max_new_tokens: int
    context_tokens: int
    # environment -> instructions its episodes begin with, if any
    instructions: Mapping[str, str] = field(default_factory=dict)
    action_format: Literal["plain", "react"] = "plain"
    # append a cut episode's last observation too, where it fits: a critic values that state
    read_last: bool = False

    def instructions_of(self, item: Item) -> str:
        return self.instructions.get(item.env, "")


@dataclass(slots=True)
class Episode:
    """A live episode. Its token lists only grow."""

    item: Item
    sample: int
    settings: EpisodeSettings
    first_observation: str
    input_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    timing: dict[str, float] = field(default_factory=lambda: {"generate_s": 0.0, "env_s": 0.0})

    def read(self, ids: list[int]) -> None:
        """Append tokens the policy did not choose."""
        self.input_ids += ids
        self.action_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def act(self, completion: Completion) -> None:
        """Append exactly what the engine sampled."""
        self.input_ids += completion.ids
        self.action_mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs

    def finish(
        self, status: Status, *, num_attempts: int = 1, error: str | None = None
    ) -> Trajectory:
        """The episode as a record; a failed environment leaves no reward."""
        return Trajectory(
            item=self.item,
            sample=self.sample,
            step=self.settings.step,
            max_turns=self.settings.max_turns,
            status=status,
            reward=sum(turn.reward for turn in self.turns) if status.is_valid else None,
            success=self.success and status.is_valid,
            first_observation=self.first_observation,
            turns=tuple(self.turns),
            input_ids=tuple(self.input_ids),
            action_mask=tuple(self.action_mask),
            logprobs=tuple(self.logprobs),
            temperature=self.settings.temperature,
            num_attempts=num_attempts,
            error=error,
            timing=self.timing,
        )


async def run_episode(
    policy: Policy, session: OpenSession, renderer: ChatRenderer, episode: Episode
) -> Status:
    """Play until the environment ends the task, the horizon or the context is used up."""
    settings = episode.settings
    episode.read(renderer.start(session.observation, settings.instructions_of(episode.item)))
    if len(episode.input_ids) + settings.max_new_tokens > settings.context_tokens:
        return Status.MAX_TOKENS
    for turn in range(settings.max_turns):
        key = SampleKey(settings.seed, settings.step, episode.item.item_id, episode.sample, turn)
        began = time.perf_counter()
        completion = await policy.generate(
            list(episode.input_ids), Sampling(key, settings.temperature, settings.max_new_tokens)
        )
        episode.timing["generate_s"] += time.perf_counter() - began
        start = len(episode.input_ids)
        episode.act(completion)
        action = extract_action(renderer.text(completion.ids), settings.action_format)
        began = time.perf_counter()
        reply = await session.step(action)
        episode.timing["env_s"] += time.perf_counter() - began
        episode.turns.append(
            Turn(
                action,
                reply.observation,
                reply.reward,
                start,
                len(episode.input_ids),
                completion.version,
            )
        )
        ended = ending(reply)
        episode.success = ended is not None and reply.success
        if ended is Status.TERMINATED:
            return ended
        cut = ended or (Status.MAX_TURNS if turn + 1 == settings.max_turns else None)
        if cut and not settings.read_last:
            return cut
        following = renderer.bridge(reply.observation, stopped=completion.stop_reason == "stop")
        room = settings.context_tokens - len(episode.input_ids) - len(following)
        if cut is None and room < settings.max_new_tokens:
            cut = Status.MAX_TOKENS
        # a trajectory never exceeds the context
        if room >= 0 and (cut is None or settings.read_last):
            episode.read(following)
        if cut:
            return cut
    return Status.MAX_TURNS


def ending(reply: Reply) -> Status | None:
    """How the environment ended the episode with this reply; None where it goes on.

    An environment that reports both has ended the task: there is no future to value.
    """
    if reply.terminated:
        return Status.TERMINATED
    return Status.ENV_LIMIT if reply.truncated else None


def reply_naming(action: str, action_format: Literal["plain", "react"]) -> str:
    """The inverse of `extract_action`: what a demonstrator says to take an action."""
    return action if action_format == "plain" else f"Action: {action}"


def extract_action(reply: str, action_format: Literal["plain", "react"]) -> str:
    """The action a reply names. react: the rest of the line after the last `Action:`, empty
    where there is none.
    """
    if action_format == "plain":
        return reply.strip()
    _, found, rest = reply.rpartition("Action:")
    lines = rest.strip().splitlines()
    return lines[0].strip() if found and lines else ""
