"""Players without tokens: an environment's expert, a script, or chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import Episode, PlayerFailed, PlayerReply
from agentgym.types import Sampling
from envs.wire import ErrorKind


class TextPlayer:
    """Base of players without tokens. Their context has no known limit: there is always room."""

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
    """A player that replies with prepared lines, in order; it gives up after the last one."""

    def __init__(self, lines: Sequence[PlayerReply]) -> None:
        self._lines = iter(lines)

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        return next(self._lines, None)


class NoHints(PlayerFailed):
    """Error of `RandomPlayer` if a server does not list the possible actions; it is final."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"{endpoint} gives no hints, of which random draws its actions; evaluate echo:ACTION,"
            " or set offers_hints of the environment's EnvSpec",
            final=True,
        )


async def hints_of(session: Any) -> list[str]:
    """Return actions that the environment suggests in a session now.
    Errors: NoHints if its server does not list them; EnvError.
    """
    if not hasattr(session, "hints"):  # only our own protocol has them
        raise NoHints(session.endpoint)
    try:
        return list(await session.hints())
    except EnvError as error:
        if error.kind != ErrorKind.BAD_REQUEST:
            raise
        raise NoHints(session.endpoint) from None


class RandomPlayer(TextPlayer):
    """A player that draws uniformly from the possible actions; the sample's key decides the draw.
    It gives up if there are none. Errors: NoHints if the server does not list them.
    """

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        actions = sorted(await hints_of(session))
        if not actions:
            return None
        action = actions[int(sampling.key.chance() * len(actions))]
        return PlayerReply(action, action)
