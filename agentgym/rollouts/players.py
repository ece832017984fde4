"""Players of an episode: an engine's tokens, an environment's expert, a script, or chance."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import (
    Episode,
    Player,
    PlayerFailed,
    PlayerReply,
    environment_waits,
    extract_action,
)
from agentgym.types import Item, Policy, SampleKey, Sampling
from envs.wire import ErrorKind

PlayerOf = Callable[[Item, int], Player]  # (item, sample) -> a new player; it plays one episode
REPLY_S = 1800.0  # limit for one reply of an engine, even on a busy CPU


class EngineStalled(RuntimeError):
    """The engine gave no reply in time. This is no environment failure: the run ends."""


class TokenPlayer:
    """A player that acts with an engine's tokens, through the chat template of its model."""

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
        return PlayerReply(text, action, completion.version, start, len(episode.input_ids))

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


class TextPlayer:
    """Base of the players without tokens, whose context has no known limit."""

    def begin(self, episode: Episode) -> bool:
        return True

    def hear(self, observation: str, *, last: bool) -> bool:
        return True


class ExpertPlayer(TextPlayer):
    """A player that asks the environment's own expert, and gives up if that has no answer."""

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        try:
            action = await session.expert()
        except EnvError as error:
            if error.kind != "expert_failed":
                raise
            return None
        return PlayerReply(action, action)


class ScriptedPlayer(TextPlayer):
    """A player of prepared lines; it gives up after the last one."""

    def __init__(self, lines: Sequence[PlayerReply]) -> None:
        self._lines = iter(lines)

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        return next(self._lines, None)


class NoHints(PlayerFailed):
    """The environment offers no list of possible actions to draw from."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"{endpoint} gives no hints, of which random draws its actions; evaluate echo:ACTION,"
            " or set offers_hints of the environment's EnvSpec",
            final=True,
        )


async def hints_of(session: Any) -> list[str]:
    """Return the actions that are possible now. Errors: NoHints; EnvError."""
    if not hasattr(session, "hints"):  # only our own protocol has them
        raise NoHints(session.endpoint)
    try:
        return list(await session.hints())
    except EnvError as error:
        if error.kind != ErrorKind.BAD_REQUEST:
            raise
        raise NoHints(session.endpoint) from None


class RandomPlayer(TextPlayer):
    """A player that draws uniformly from the possible actions; equal keys give equal actions.
    It gives up if there are none. Errors: NoHints if the server does not list them.
    """

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        actions = sorted(await hints_of(session))
        if not actions:
            return None
        action = actions[int(chance(sampling.key) * len(actions))]
        return PlayerReply(action, action)


def chance(key: SampleKey) -> float:
    """Return a number in [0, 1) that is a function of the key."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / 2**48
