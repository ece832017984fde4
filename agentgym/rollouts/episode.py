"""One episode: a conversation, and under it the tokens of players that have them, append only."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from agentgym.types import Completion, Item, SampleKey, Sampling, Status, Trajectory, Turn, Usage


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
    @property
    def info(self) -> Mapping[str, Any]: ...


class OpenSession(Protocol):
    """An open session of an environment; `agentgym.rollouts.pools.EnvSession` is one."""

    @property
    def observation(self) -> str: ...
    async def step(self, action: str) -> Reply: ...


class Said(NamedTuple):
    """What a player says in its turn."""

    text: str
    action: str | None = None  # None: what the action format finds in the text
    version: int = 0  # of the weights that sampled it
    start: int = 0  # its tokens are input_ids[start:end]; both 0 where it has none
    end: int = 0


class Player(Protocol):
    """Plays one episode: an engine's tokens, an expert, a hosted model, a script."""

    def begin(self, episode: Episode) -> bool:
        """Hear the instructions and the first observation. Result: is there room to act."""
        ...

    async def act(self, session: Any, sampling: Sampling) -> Said | None:
        """None: it gives up. Errors: ContextFull where what it heard leaves no room to act;
        PlayerFailed where it cannot go on; EnvError where the environment was asked and failed.
        """
        ...

    def hear(self, observation: str, *, last: bool) -> bool:
        """Hear what answered the action; last: no turn follows. Result: is there room to act."""
        ...


class ContextFull(Exception):
    """A player that learns only when it acts that its context is used up."""


class PlayerFailed(RuntimeError):
    """A player that cannot go on with this episode, through no fault of the policy's: another
    attempt may get further, unless it is final. Nothing of it is a reward of 0.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


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

    def sampling(self, item: Item, sample: int, turn: int) -> Sampling:
        key = SampleKey(self.seed, self.step, item.item_id, sample, turn)
        return Sampling(key, self.temperature, self.max_new_tokens)

    def instructions_of(self, item: Item) -> str:
        return self.instructions.get(item.env, "")


@dataclass(slots=True)
class Episode:
    """A live episode: the conversation and, where its player has tokens, their record, which only
    grows.
    """

    item: Item
    sample: int
    settings: EpisodeSettings
    first_observation: str
    input_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    usage: Usage | None = None  # of the player's calls so far, where it counts them
    began: float = field(default_factory=time.perf_counter)
    began_at: float = field(default_factory=time.time)  # seconds since 1970

    async def step(self, session: OpenSession, said: Said, generate_s: float) -> Reply:
        """Carry out what was said, and keep both. Errors: EnvError."""
        settings = self.settings
        action = said.action
        if action is None:
            action = extract_action(said.text, settings.action_format)
        asked = time.perf_counter()
        reply = await session.step(action)
        more = said.text not in (action, reply_naming(action, settings.action_format))
        self.turns.append(
            Turn(
                action,
                reply.observation,
                reply.reward,
                said.start,
                said.end,
                said.version,
                reply=said.text if more else "",
                info=dict(reply.info),
                generate_s=round(generate_s, 5),
                env_s=round(time.perf_counter() - asked, 5),
            )
        )
        return reply

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
            id=self.id,
            usage=self.usage,
            timing={
                "generate_s": round(sum(turn.generate_s for turn in self.turns), 4),
                "env_s": round(sum(turn.env_s for turn in self.turns), 4),
                "wall_s": round(time.perf_counter() - self.began, 4),
                "began_s": round(self.began_at, 3),
            },
        )

    @property
    def id(self) -> str:
        """16 hex digits that tell it from every other episode of its step."""
        settings = self.settings
        told = (
            *(settings.seed, settings.step, settings.max_turns, settings.temperature),
            *(self.item.split, self.item.item_id, self.sample),
        )
        return hashlib.blake2b("\x1f".join(map(str, told)).encode(), digest_size=8).hexdigest()


# of the episode that this task plays: its environment's time
_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def environment_time(seconds: float) -> AsyncIterator[None]:
    """Limit how long an episode's environment may take in all.
    Errors: TimeoutError.
    """
    async with asyncio.timeout(seconds) as deadline:
        token = _deadline.set(deadline)
        try:
            yield
        finally:
            _deadline.reset(token)


@contextmanager
def environment_waits() -> Iterator[None]:
    """Leave out of that time what others take: an engine, a person, the other episodes."""
    deadline = _deadline.get()
    if deadline is None or (ends_at := deadline.when()) is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    began = clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(ends_at + clock() - began)


async def no_pace(_: SampleKey) -> None:
    """Every episode as fast as it goes."""


async def run_episode(
    player: Player,
    session: OpenSession,
    episode: Episode,
    pace: Callable[[SampleKey], Awaitable[None]] = no_pace,
) -> Status:
    """Play until the environment ends the task, the horizon or the context is used up, or the
    player gives up, which counts as the horizon.

    pace: awaited before each turn.
    """
    settings = episode.settings
    if not player.begin(episode):
        return Status.MAX_TOKENS
    for turn in range(settings.max_turns):
        sampling = settings.sampling(episode.item, episode.sample, turn)
        with environment_waits():
            await pace(sampling.key)
        asked = time.perf_counter()
        try:
            said = await player.act(session, sampling)
        except ContextFull:
            return Status.MAX_TOKENS
        if said is None:
            return Status.MAX_TURNS
        reply = await episode.step(session, said, time.perf_counter() - asked)
        ended = ending(reply)
        episode.success = ended is not None and reply.success
        if ended is Status.TERMINATED:
            return ended
        cut = ended or (Status.MAX_TURNS if turn + 1 == settings.max_turns else None)
        if cut and not settings.read_last:
            return cut
        has_room = player.hear(reply.observation, last=cut is not None)
        if cut or not has_room:
            return cut or Status.MAX_TOKENS
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


def extract_action(
    reply: str, action_format: Literal["plain", "react"], *, opens_thought: bool = False
) -> str:
    """The action a reply names. react: the rest of the line after the last `Action:`, empty
    where there is none.

    A thought up to `</think>` names none, nor does one that was cut before its end.
    opens_thought: the chat template began the thought, before the reply.
    """
    _, closes, reply = reply.rpartition("</think>")
    if reply.lstrip().startswith("<think>") or (opens_thought and not closes):
        return ""
    if action_format == "plain":
        return reply.strip()
    _, found, rest = reply.rpartition("Action:")
    lines = rest.strip().splitlines()
    return lines[0].strip() if found and lines else ""
