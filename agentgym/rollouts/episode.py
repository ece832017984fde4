"""One episode: the loop between a player and a session, the record that it appends to, the player
that samples tokens from an engine, and the instructions that episodes begin with.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from agentgym.config import ConfigError
from agentgym.types import (
    Completion,
    Item,
    Policy,
    SampleKey,
    Sampling,
    Status,
    Trajectory,
    Turn,
    Usage,
)
from envs.wire import Example, StepReply

if TYPE_CHECKING:
    from agentgym.models.chat import ChatRenderer

REPLY_S = 1800.0  # limit for one reply of an engine, even on a busy CPU
INTRODUCTION = (
    "Worked examples. Observation is what you are shown, Reply is a whole reply of yours."
)
ENDING = "End of the examples."


class OpenSession(Protocol):
    """An open session of an environment; `agentgym.rollouts.env_client.EnvSession` is one."""

    @property
    def observation(self) -> str: ...
    async def step(self, action: str) -> StepReply: ...


class PlayerReply(NamedTuple):
    """A player's reply in one turn."""

    text: str
    action: str | None = None  # None: extract it from the text by the action format
    version: int = 0  # of the weights that sampled it
    start: int = 0  # its tokens are input_ids[start:end]; both 0 if it has none
    end: int = 0
    has_logprobs: bool = True


class Player(Protocol):
    """A player of one episode, for example an engine, an expert, a hosted model or a script."""

    def begin(self, episode: Episode) -> bool:
        """Read the instructions and the first observation. Result: True if there is room to act."""
        ...

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        """Return the next reply; None to give up.
        Errors: ContextFull if the conversation leaves no room to act; PlayerFailed if the player
        cannot continue; EnvError if a request to the environment failed.
        """
        ...

    def hear(self, observation: str, *, last: bool) -> bool:
        """Read the observation that answers the action. last: no turn follows.
        Result: True if there is room to act.
        """
        ...


PlayerOf = Callable[[Item, int], Player]  # (item, sample) -> a new player; it plays one episode


class ContextFull(Exception):
    """Error of `Player.act` if the context is full and the player could not know this before."""


class PlayerFailed(RuntimeError):
    """Error of a player that cannot continue this episode, through no fault of the policy.
    Another attempt may succeed, unless the error is final. The episode gets no reward, not even 0.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings shared by all episodes of one collection."""

    seed: int
    step: int  # optimizer step the episodes are for
    max_turns: int
    temperature: float
    max_new_tokens: int
    context_tokens: int
    # environment -> instructions its episodes begin with, if any
    instructions: Mapping[str, str] = field(default_factory=dict)
    action_format: Literal["plain", "react"] = "plain"
    # append a truncated episode's last observation, too, if it fits: a critic values that state
    read_last: bool = False
    engine_logprobs: float = 1.0  # share of the actions whose log-probabilities the engine gives

    def sampling(self, item: Item, sample: int, turn: int) -> Sampling:
        key = SampleKey(self.seed, self.step, item.item_id, sample, turn)
        is_drawn = key.is_drawn(self.engine_logprobs)
        return Sampling(key, self.temperature, self.max_new_tokens, is_drawn)

    def instructions_of(self, item: Item) -> str:
        return self.instructions.get(item.env, "")


@dataclass(slots=True)
class Episode:
    """A running episode: the conversation and, if its player has tokens, their record."""

    item: Item
    sample: int
    settings: EpisodeSettings
    first_observation: str
    input_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    usage: Usage | None = None  # of the player's calls so far, if it counts them
    began: float = field(default_factory=time.perf_counter)
    began_at: float = field(default_factory=time.time)  # seconds since 1970

    async def step(
        self, session: OpenSession, message: PlayerReply, generate_s: float
    ) -> StepReply:
        """Send the message's action, record the turn and return the environment's reply.
        message: the player's reply. generate_s: seconds that it took. Errors: EnvError.
        """
        action, format = message.action, self.settings.action_format
        if action is None:
            action = extract_action(message.text, format)
        began = time.perf_counter()
        reply = await session.step(action)
        has_more = message.text not in (action, reply_naming(action, format))
        self.turns.append(
            Turn(
                action,
                reply.observation,
                reply.reward,
                message.start,
                message.end,
                message.version,
                reply=message.text if has_more else "",
                info=dict(reply.info),
                has_logprobs=message.has_logprobs,
                generate_s=round(generate_s, 5),
                env_s=round(time.perf_counter() - began, 5),
            )
        )
        return reply

    def read(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.input_ids += ids
        self.action_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def act(self, completion: Completion) -> None:
        """Append the tokens that the engine sampled and their log-probabilities."""
        self.input_ids += completion.ids
        self.action_mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs or [0.0] * len(completion.ids)

    def finish(
        self, status: Status, *, num_attempts: int = 1, error: str | None = None
    ) -> Trajectory:
        """Return the trajectory. If the status is not valid, its reward is None, success False."""
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
        """16 hex digits that identify the episode among those of its step."""
        settings = self.settings
        parts = (
            *(settings.seed, settings.step, settings.max_turns, settings.temperature),
            *(self.item.split, self.item.item_id, self.sample),
        )
        return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).hexdigest()


# time limit of the episode that this asyncio task plays, see `environment_time`
_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def environment_time(seconds: float) -> AsyncIterator[None]:
    """Limit the block to `seconds`, not counting `environment_waits`. Errors: TimeoutError."""
    async with asyncio.timeout(seconds) as deadline:
        token = _deadline.set(deadline)
        try:
            yield
        finally:
            _deadline.reset(token)


@contextmanager
def environment_waits() -> Iterator[None]:
    """Stop the clock of `environment_time`, if there is one, during the block. Use it while the
    episode waits for an engine, a person or other episodes.
    """
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
    """Do not wait: every episode plays as fast as it can."""


async def run_episode(
    player: Player,
    session: OpenSession,
    episode: Episode,
    pace: Callable[[SampleKey], Awaitable[None]] = no_pace,
) -> Status:
    """Play until the environment ends the task, the horizon (`max_turns`) or the context is used
    up, or the player gives up (counted as reaching the horizon). Fill `episode`, return its status.
    pace: awaited with the sample's key before each turn. Errors: PlayerFailed, EnvError.
    """
    settings = episode.settings
    if not player.begin(episode):
        return Status.MAX_TOKENS
    for turn in range(settings.max_turns):
        sampling = settings.sampling(episode.item, episode.sample, turn)
        with environment_waits():
            await pace(sampling.key)
        began = time.perf_counter()
        try:
            answer = await player.act(session, sampling)
        except ContextFull:
            return Status.MAX_TOKENS
        if answer is None:
            return Status.MAX_TURNS
        reply = await episode.step(session, answer, time.perf_counter() - began)
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


def ending(reply: StepReply) -> Status | None:
    """Return the status with which the environment ended the episode; None if it continues.
    A reply that is both terminated and truncated counts as terminated.
    """
    if reply.terminated:
        return Status.TERMINATED
    return Status.ENV_LIMIT if reply.truncated else None


def reply_naming(action: str, action_format: Literal["plain", "react"]) -> str:
    """Return the reply that names an action in this format: the inverse of `extract_action`."""
    return action if action_format == "plain" else f"Action: {action}"


def extract_action(
    reply: str, action_format: Literal["plain", "react"], *, opens_thought: bool = False
) -> str:
    """Return the action in a reply. plain: the whole text; react: the first line of text after the
    last `Action:`, empty if there is none.

    A thought up to `</think>` contains no action, nor does a thought that was cut off.
    opens_thought: the chat template began the thought, before the reply.
    """
    _, closes, reply = reply.rpartition("</think>")
    if reply.lstrip().startswith("<think>") or (opens_thought and not closes):
        return ""
    if action_format == "plain":
        return reply.strip()
    _, marker, rest = reply.rpartition("Action:")
    lines = rest.strip().splitlines()
    return lines[0].strip() if marker and lines else ""


class EngineStalled(RuntimeError):
    """Error if the engine gave no reply within REPLY_S. It fails the run, not only the episode."""


class TokenPlayer:
    """A player that samples its replies from an engine, through the chat template of the model, and
    appends the tokens of replies and observations to the episode.
    """

    def __init__(self, policy: Policy, renderer: ChatRenderer) -> None:
        self._policy, self._renderer = policy, renderer
        self._stopped = True

    def begin(self, episode: Episode) -> bool:
        self._episode, self._settings = episode, episode.settings
        instructions = episode.settings.instructions_of(episode.item)
        episode.read(self._renderer.start(episode.first_observation, instructions))
        return self._room() >= self._settings.max_new_tokens

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply:
        episode = self._episode
        try:
            with environment_waits():
                async with asyncio.timeout(REPLY_S):
                    completion = await self._policy.generate(list(episode.input_ids), sampling)
        except TimeoutError:
            raise EngineStalled(
                f"the engine gave no reply to {len(episode.input_ids)} tokens within"
                f" {REPLY_S:g} s; nothing committed is lost: the same command continues"
            ) from None
        start = len(episode.input_ids)
        episode.act(completion)
        self._stopped = self._renderer.ends_turn(completion.ids)
        text, format = self._renderer.text(completion.ids), self._settings.action_format
        action = extract_action(text, format, opens_thought=self._renderer.opens_thought)
        end, has_logprobs = len(episode.input_ids), bool(completion.logprobs)
        return PlayerReply(text, action, completion.version, start, end, has_logprobs)

    def hear(self, observation: str, *, last: bool) -> bool:
        following = self._renderer.bridge(observation, stopped=self._stopped)
        room = self._room() - len(following)
        goes_on = not last and room >= self._settings.max_new_tokens
        # a trajectory never exceeds the context
        if room >= 0 and (goes_on or self._settings.read_last):
            self._episode.read(following)
        return room >= self._settings.max_new_tokens

    def _room(self) -> int:
        return self._settings.context_tokens - len(self._episode.input_ids)


def token_players(policy: Policy, renderer: ChatRenderer) -> PlayerOf:
    """Return a `PlayerOf` that plays all episodes with one engine."""
    return lambda *_: TokenPlayer(policy, renderer)


@dataclass(frozen=True, slots=True)
class Guide:
    """The instructions and worked examples of one environment; empty if its servers have none."""

    instructions: str = ""
    examples: tuple[Example, ...] = ()

    def opening(self, env: str, num_examples: int, action_format: Literal["plain", "react"]) -> str:
        """Return the instructions, then `num_examples` worked examples with replies in this format.
        env: name of the environment, for errors. Errors: ConfigError if there are fewer examples.
        """
        if num_examples > len(self.examples):
            raise ConfigError(
                f"{env}: examples {num_examples}, and its servers offer"
                f" {len(self.examples) or 'no'} worked examples; lower rollout.examples, or"
                " examples of the protocol"
            )
        if not num_examples:
            return self.instructions
        parts = [self.instructions, INTRODUCTION]
        for number, example in enumerate(self.examples[:num_examples], start=1):
            lines = [f"Example {number}", f"Observation: {example.observation}"]
            for turn in example.turns:
                lines.append(f"Reply: {reply_naming(turn.action, action_format)}")
                lines.append(f"Observation: {turn.observation}")
            parts.append("\n".join(lines))
        return "\n\n".join([*parts, ENDING])
