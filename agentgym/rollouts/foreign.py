"""Parts shared by the clients of AgentGym's and OpenEnv's servers: retries, parsing, errors."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from agentgym.private import token_of
from agentgym.rollouts.env_client import BACKOFF_S, EnvError, backoff_s, request_headers
from envs.plain import whole

T = TypeVar("T")
_SHOWN = 200  # characters of an answer in an error


class ForeignPool:
    """Base of the pools of servers that speak another protocol than ours. Use as `async with`."""

    def __init__(self, endpoints: Sequence[str], *, max_retries: int) -> None:
        self.endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        headers = [request_headers(token_of(endpoint)) for endpoint in endpoints]
        self._headers = dict(zip(self.endpoints, headers, strict=True))
        self._max_retries = max_retries
        self._open = dict.fromkeys(self.endpoints, 0)  # our own sessions
        self._random = random.SystemRandom()  # unseeded: the choice of server changes no result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: no connection stays open between sessions."""

    def _less_used(self) -> str:
        """Return the one of two random servers that has fewer sessions of ours."""
        pair = self._random.sample(self.endpoints, min(2, len(self.endpoints)))
        return min(pair, key=self._open.__getitem__)

    async def _repeated(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        first_s: float = BACKOFF_S,
        patience_s: float = 0.0,
    ) -> T:
        """Return the result of `attempt`. If servers are full or unreachable, repeat it, at least
        `max_retries` times and for at least `patience_s`; wait `first_s`, then longer, in between.
        Errors: the last EnvError; one of another kind at once.
        """
        number, until = 0, time.monotonic() + patience_s
        while True:
            try:
                return await attempt()
            except EnvError as error:
                is_last = number >= self._max_retries and time.monotonic() >= until
                if error.kind not in ("unreachable", "full") or is_last:
                    raise
            await asyncio.sleep(backoff_s(number, first_s))
            number += 1

    @contextmanager
    def _counted(self, endpoint: str) -> Iterator[None]:
        """Count one more open session of ours at the endpoint during the block."""
        self._open[endpoint] += 1
        try:
            yield
        finally:
            self._open[endpoint] -= 1


def text_of(answer: Any) -> str:
    """Return a server's text with lone surrogates replaced. Errors: TypeError if it is no text."""
    if not isinstance(answer, str):
        raise TypeError(f"{type(answer).__name__} is no text")
    return whole(answer)


def flag_of(answer: Any) -> bool:
    """Return a server's boolean. Errors: TypeError for other values, also the string "false"."""
    if not isinstance(answer, bool):
        raise TypeError(f"{type(answer).__name__} is no flag")
    return answer


def number_of(answer: Any) -> float:
    """Return a server's number. Errors: TypeError if it is none, ValueError if it is not finite."""
    if not isinstance(answer, int | float):
        raise TypeError(f"{type(answer).__name__} is no number")
    if not math.isfinite(answer):
        raise ValueError(f"{answer} is not finite")
    return float(answer)


def unreachable(endpoint: str, route: str, error: Exception) -> EnvError:
    return EnvError(endpoint, route, "", "unreachable", f"{type(error).__name__} {error}".strip())


def unexpected(endpoint: str, route: str, answer: Any) -> EnvError:
    """Return the error for an unexpected answer, which it quotes. answer: as parsed from JSON."""
    excerpt = json.dumps(answer)[:_SHOWN]
    return EnvError(endpoint, route, "", "protocol", f"unexpected answer {excerpt}")
