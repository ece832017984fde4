"""Models behind an OpenAI-compatible endpoint: they play and are judged, and never learn here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from agentgym.rollouts.episode import ContextFull, Episode, Said
from agentgym.rollouts.players import chance
from agentgym.types import Item, Sampling
from envs.plain import plain

logger = logging.getLogger(__name__)

PREFIX = "AGENTGYM_SECRET_"  # of the variables that may hold a key
MAX_REPLY_BYTES = 4 * 1024 * 1024
BACKOFF_S, LONGEST_WAIT_S = 0.5, 30.0
AGAIN = (408, 409, 425, 429)  # and whatever is 500 or more
FULL = "context_length_exceeded"


class HostedError(RuntimeError):
    """The endpoint does not answer, or not as agreed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`POST {base_url}/chat/completions`."""

    base_url: str
    model: str
    key_variable: str = ""  # of the environment; empty: none is sent
    timeout_s: float = 60.0  # of one request
    max_retries: int = 5

    def __post_init__(self) -> None:
        """Errors: ValueError."""
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError(
                f"{_line(self.base_url)!r} is no endpoint; give a URL such as"
                " https://host/v1, without a user"
            )
        if self.key_variable and not self.key_variable.startswith(PREFIX):
            raise ValueError(
                f"a key is read from variables that begin with {PREFIX} alone, got"
                f" {self.key_variable!r}"
            )
        if self.key_variable and not os.environ.get(self.key_variable):
            raise ValueError(f"the variable {self.key_variable} is not set; it holds the key")


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    num_tokens: int  # of prompt and reply, as the endpoint counts; 0: it does not say


class HostedModel:
    """A client of one endpoint. Use as `async with`; `player` is a `PlayerOf`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # no redirects and no proxy of the environment: the key goes where it was sent to
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout_s), trust_env=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    def player(self, item: Item, sample: int) -> HostedPlayer:
        return HostedPlayer(self)

    async def chat(self, messages: list[dict[str, str]], sampling: Sampling) -> _Answer:
        """Errors: ContextFull; HostedError after `max_retries`, or at once where asking again
        cannot help.
        """
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": _seed(sampling),
        }
        headers = {"Idempotency-Key": "-".join(map(str, sampling.key))}
        if self._endpoint.key_variable:
            key = os.environ[self._endpoint.key_variable]
            headers["Authorization"] = f"Bearer {key}"
        problem = ""
        for attempt in range(1 + self._endpoint.max_retries):
            wait_s: float | None = None
            try:
                status, wait_s, content = await self._post(body, headers)
                if status == 200:
                    return _read(content)
                problem = f"status {status}: {_line(content[:200].decode('utf-8', 'replace'))}"
                if status == 400 and FULL.encode() in content:
                    raise ContextFull
                if status < 500 and status not in AGAIN:
                    break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = f"{type(error).__name__} {error}".strip()
            if attempt < self._endpoint.max_retries:
                logger.info("%s: %s; asked again", self._endpoint.model, problem)
                await asyncio.sleep(min(LONGEST_WAIT_S, wait_s or BACKOFF_S * 2**attempt))
        raise HostedError(f"model {self._endpoint.model} at {self._endpoint.base_url}: {problem}")

    async def _post(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, float | None, bytes]:
        """(status, seconds to wait if the endpoint says so, body). Errors: ValueError where it is
        too long; what aiohttp raises.
        """
        assert self._session is not None, "use it as `async with`"
        url = f"{self._endpoint.base_url.rstrip('/')}/chat/completions"
        async with self._session.post(
            url, json=body, headers=headers, allow_redirects=False
        ) as reply:
            content = await reply.content.read(MAX_REPLY_BYTES + 1)
            while len(content) <= MAX_REPLY_BYTES and (more := await reply.content.read(65536)):
                content += more
            if len(content) > MAX_REPLY_BYTES:
                raise ValueError(f"its reply is longer than {MAX_REPLY_BYTES} bytes")
            said = reply.headers.get("Retry-After", "")
            return reply.status, float(said) if said.isdecimal() else None, content


class HostedPlayer:
    """Holds the conversation as messages. Its context ends where the endpoint says so, or where
    the run's would, by the endpoint's own count.
    """

    def __init__(self, model: HostedModel) -> None:
        self._model = model
        self._messages: list[dict[str, str]] = []
        self._num_tokens = 0

    def begin(self, episode: Episode) -> bool:
        self._settings = episode.settings
        if instructions := episode.settings.instructions_of(episode.item):
            self._messages.append({"role": "system", "content": instructions})
        self._messages.append({"role": "user", "content": episode.first_observation})
        return True

    async def act(self, session: Any, sampling: Sampling) -> Said:
        answer = await self._model.chat(self._messages, sampling)
        self._num_tokens = answer.num_tokens
        self._messages.append({"role": "assistant", "content": answer.text})
        return Said(answer.text)

    def hear(self, observation: str, *, last: bool) -> bool:
        self._messages.append({"role": "user", "content": observation})
        room = self._settings.context_tokens - self._num_tokens
        return room >= self._settings.max_new_tokens


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def _seed(sampling: Sampling) -> int:
    """Of the sample's key, for endpoints that draw with a seed."""
    return int(chance(sampling.key) * 2**31)


def _read(content: bytes) -> _Answer:
    """Errors: ValueError where it is not what was agreed."""
    try:
        answer = json.loads(content)
        text = answer["choices"][0]["message"]["content"] or ""
        usage = answer.get("usage") or {}
        return _Answer(str(text), int(usage.get("total_tokens") or 0))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion: {type(error).__name__} {error}") from error
