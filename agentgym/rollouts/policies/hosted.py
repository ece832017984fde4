"""Models behind an OpenAI-compatible endpoint: they play and are evaluated, never trained."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from agentgym.rollouts.episode import (
    ContextFull,
    Episode,
    PlayerFailed,
    PlayerReply,
    environment_waits,
)
from agentgym.rollouts.policies.prices import Tariff
from agentgym.types import Item, Sampling, Usage
from envs.plain import plain, whole

logger = logging.getLogger(__name__)

PREFIX = "AGENTGYM_SECRET_"  # of the environment variables that may contain a key
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_TOLD = 300  # characters of an endpoint's message
MAX_COUNT = 2**40  # tokens of one request; a larger number is invalid
BACKOFF_S, LONGEST_BACKOFF_S, LONGEST_WAIT_S = 0.5, 30.0, 120.0
AGAIN = (408, 409, 425, 429)  # retried, like 500 and above
FULL = ("context_length_exceeded", "maximum context length")
FILTERED = "content_filter"  # a finish_reason; some endpoints use it as an error code, too
LIMITS = ("max_tokens", "max_completion_tokens")  # old and new name of a reply's token limit
TEXT_PARTS = ("text", "output_text")  # types of content parts that belong to the reply
NO_LISTING = (ValueError, LookupError, TypeError, RecursionError)  # for an unexpected answer
MOST_LOST = 8  # after so many failed calls in a row the endpoint counts as gone
REFUSED = Usage(num_calls=1, num_failed=1)  # used no tokens
LOST = Usage(num_calls=1, num_failed=1, num_untold=1)  # may have used tokens


class HostedError(PlayerFailed):
    """The endpoint gave no valid answer, or no further request may be sent to it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, limits and prices of one model behind an OpenAI-compatible endpoint."""

    base_url: str
    model: str
    key_variable: str = ""  # environment variable of the key; empty: no key is sent
    timeout_s: float = 60.0  # of one request
    max_retries: int = 5
    max_concurrency: int = 64  # requests in flight
    max_per_minute: float = 0.0  # requests; 0: no limit
    tariff: Tariff | None = None
    max_cost: float | None = None  # in the tariff's currency; no request begins above it

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid URL, a key variable that is not set or lacks PREFIX, or a
        cost limit without a tariff.
        """
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
        if self.max_cost is not None and self.tariff is None:
            raise ValueError("a limit of cost needs prices; name a price file too")

    @property
    def headers(self) -> dict[str, str]:
        """Headers with the key, read from the environment and not stored; empty without a key."""
        variable = self.key_variable
        return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}

    def without_key(self, text: str) -> str:
        """Return a text with the key masked: endpoints repeat a key that they refuse."""
        key = os.environ.get(self.key_variable, "")
        return text.replace(key, "***") if key else text


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    num_tokens: int  # of prompt and reply, as the endpoint counts; 0: not reported
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Failure:
    """Failure of one request."""

    problem: str
    again: bool  # True if the same request may be sent again
    wait_s: float | None = None  # the wait that the endpoint asks for
    usage: Usage = REFUSED


class HostedModel:
    """A client that asks one endpoint for replies, with retries, a rate limit and a cost limit.
    Use as `async with`; `player` is a `PlayerOf`.
    """

    def __init__(self, endpoint: Endpoint, spent: Usage | None = None) -> None:
        """Prepare a client. spent: earlier usage, which counts against the cost limit, too."""
        self.stopped = ""  # why no further request is sent; empty: requests are sent
        self.spent = spent or Usage()
        self._unsaid = Usage()  # upper bound of the tokens of calls without counts
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(endpoint.max_concurrency)
        self._next_at = 0.0  # monotonic time at which the next request may begin
        self._num_lost = 0  # failed calls since the last answer
        self._limit = LIMITS[0]  # this endpoint's name of a reply's token limit

    async def __aenter__(self) -> Self:
        # no redirects and no proxy of the environment: the key must reach only the endpoint
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout_s), trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    def player(self, item: Item, sample: int) -> HostedPlayer:
        return HostedPlayer(self)

    async def chat(
        self,
        messages: list[dict[str, str]],
        sampling: Sampling,
        spend: Callable[[Usage], None] = lambda _: None,
    ) -> _Answer:
        """Return the endpoint's reply to a conversation.
        messages: with `role` and `content`, as in OpenAI's API. sampling: the key gives the seed.
        spend: called with the usage of each request, including failed ones.
        Errors: ContextFull; HostedError after `max_retries`, or at once if a retry cannot help;
        `final` if every further request would fail.
        """
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "seed": int(sampling.key.chance() * 2**31),  # for endpoints that accept one
        }
        sizes = (len(message["content"].encode("utf-8", "replace")) for message in messages)
        upper_bound = Usage(input_tokens=sum(sizes), output_tokens=sampling.max_new_tokens)
        headers = {"Idempotency-Key": "-".join(map(str, sampling.key)), **self._endpoint.headers}

        def took(usage: Usage) -> None:
            self.spent += usage
            if usage.num_untold:  # a token has at least one byte
                self._unsaid += upper_bound
            spend(usage)

        attempt = 0
        while True:
            limit = self._limit
            async with self._slots:
                await self._turn()
                self._check()
                try:
                    result = await self._ask({**body, limit: sampling.max_new_tokens}, headers)
                except asyncio.CancelledError:  # the episode exceeded its time limit
                    took(LOST)
                    raise
            took(result.usage)
            if isinstance(result, _Answer):
                self._num_lost = 0
                return result
            if limit == LIMITS[0] and LIMITS[1] in result.problem and not result.again:
                self._limit = LIMITS[1]  # never back to the old name
                continue
            if result.wait_s is not None:  # holds for all requests
                self._next_at = max(self._next_at, time.monotonic() + result.wait_s)
            if not result.again or attempt == self._endpoint.max_retries:
                raise self._given_up(result)
            logger.info("%s: %s; asked again", self._endpoint.model, result.problem)
            if result.wait_s is None:
                await asyncio.sleep(_backoff(attempt))
            attempt += 1

    def _given_up(self, failure: _Failure) -> HostedError:
        self._num_lost += 1
        error = f"model {self._endpoint.model} at {self._endpoint.base_url}: {failure.problem}"
        if not failure.again:
            self.stopped = self.stopped or error
        elif self._num_lost >= MOST_LOST:
            self.stopped = self.stopped or f"{self._num_lost} calls in a row were lost; {error}"
        return HostedError(error, final=bool(self.stopped))

    def _check(self) -> None:
        """Stop the client if the cost limit is reached; raise HostedError if it has stopped."""
        limit, tariff = self._endpoint.max_cost, self._endpoint.tariff
        if limit is not None and tariff is not None and not self.stopped:
            cost, unsaid = tariff.cost(self.spent), tariff.cost(self._unsaid).amount
            if cost.amount + unsaid >= limit:
                self.stopped = (
                    f"the limit of cost is reached: {cost.amount:.4f} of {limit:.4f}"
                    f" {cost.currency}"
                )
                if unsaid:
                    self.stopped += (
                        f", and at most {unsaid:.4f} for {self.spent.num_untold} calls without"
                        " counts of tokens"
                    )
        if self.stopped:
            raise HostedError(self.stopped, final=True)

    async def _turn(self) -> None:
        """Wait until Retry-After and the rate limit, in which it then counts, allow a request."""
        while (wait_s := self._next_at - time.monotonic()) > 0:  # noqa: ASYNC110  (grows meanwhile)
            await asyncio.sleep(wait_s)
        if self._endpoint.max_per_minute:
            self._next_at = time.monotonic() + 60 / self._endpoint.max_per_minute

    async def _ask(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> _Answer | _Failure:
        """Send one request; return its answer or its failure. Errors: ContextFull."""
        try:
            status, wait_s, content = await self._post(body, headers)
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            return _Failure(f"{type(error).__name__} {error}", again=True)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            problem = f"{type(error).__name__} {error}".strip()
            return _Failure(problem, again=True, usage=LOST)
        try:
            answer = json.loads(content)
            if status == 200 and not _error_in(answer):
                read = _read(answer)  # the text is stored as an action and shown: mask the key
                return replace(read, text=self._endpoint.without_key(read.text))
        except (ValueError, RecursionError) as error:
            if status == 200:
                return _Failure(f"{type(error).__name__} {error}", again=True, usage=LOST)
            answer = None
        return self._refused(status, content.decode("utf-8", "replace"), _error_in(answer), wait_s)

    def _refused(
        self, status: int, text: str, error: Mapping[str, Any], wait_s: float | None
    ) -> _Answer | _Failure:
        """Return the failure of a request that got no completion. If a filter refused the prompt,
        return an empty reply instead, because a retry would not change it.
        text: the whole answer. error: its error object, may be empty. wait_s: see `_post`.
        With status 200 the error's code counts as the status, if it has three digits.
        Errors: ContextFull.
        """
        code, message = error.get("code"), error.get("message")
        if str(code) == FILTERED and status < 500:
            return _Answer("", 0, Usage(num_calls=1, num_untold=1, num_filtered=1))
        is_status = isinstance(code, int | str) and re.fullmatch("[0-9]{3}", str(code))
        meant = int(str(code)) if status == 200 and is_status else status
        if meant in (200, 400) and any(phrase in text for phrase in FULL):
            raise ContextFull
        line = _line(message if isinstance(message, str) and message else text)
        excerpt = self._endpoint.without_key(line)[:MAX_TOLD]
        named = f"status {status}" if meant == status else f"error {meant} with status {status}"
        problem, again = f"{named}: {excerpt}", meant == 200 or meant >= 500 or meant in AGAIN
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            problem, wait_s = f"{problem}; it asks to wait {wait_s:g} s", LONGEST_WAIT_S
        usage = LOST if status == 200 else REFUSED
        return _Failure(problem, again, wait_s if again else None, usage)

    async def _post(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, float | None, bytes]:
        """Send a request; return (status, seconds to wait if the endpoint asks for it, body).
        Errors: ValueError if the body is too long; aiohttp's exceptions.
        """
        assert self._session is not None, "use it as `async with`"
        url = f"{self._endpoint.base_url.rstrip('/')}/chat/completions"
        async with self._session.post(
            url, json=body, headers=headers, allow_redirects=False
        ) as reply:
            content = await _body(reply)
            return reply.status, _retry_after(reply.headers.get("Retry-After", "")), content


class HostedPlayer:
    """A player that keeps the conversation as messages. Its context is full if the endpoint
    reports so, or if the endpoint's token count reaches the run's limit.
    """

    def __init__(self, model: HostedModel) -> None:
        self._model = model
        self._messages: list[dict[str, str]] = []
        self._num_tokens = 0

    def begin(self, episode: Episode) -> bool:
        self._episode, self._settings = episode, episode.settings
        episode.usage = Usage()
        if instructions := episode.settings.instructions_of(episode.item):
            self._messages.append({"role": "system", "content": instructions})
        self._messages.append({"role": "user", "content": episode.first_observation})
        return True

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply:
        with environment_waits():
            answer = await self._model.chat(self._messages, sampling, self._spend)
        self._num_tokens = answer.num_tokens
        self._messages.append({"role": "assistant", "content": answer.text})
        return PlayerReply(answer.text)

    def hear(self, observation: str, *, last: bool) -> bool:
        self._messages.append({"role": "user", "content": observation})
        room = self._settings.context_tokens - self._num_tokens
        return room >= self._settings.max_new_tokens

    def _spend(self, usage: Usage) -> None:
        self._episode.usage = (self._episode.usage or Usage()) + usage


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """Return the whole body, also of a reply in chunks. Errors: ValueError if it is too long."""
    content = b""
    while len(content) <= MAX_REPLY_BYTES and (chunk := await reply.content.read(65536)):
        content += chunk
    if len(content) > MAX_REPLY_BYTES:
        raise ValueError(f"its reply is longer than {MAX_REPLY_BYTES} bytes")
    return content


async def only_model(base_url: str, key_variable: str = "", timeout_s: float = 30.0) -> str:
    """Return the name of an endpoint's only model. key_variable: see `Endpoint`.
    Errors: ValueError if it has none or several, or does not list them.
    """
    endpoint = Endpoint(base_url, "", key_variable)
    url = f"{base_url.rstrip('/')}/models"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(url, headers=endpoint.headers, allow_redirects=False) as reply,
        ):
            answer = json.loads(await _body(reply))
            names = [endpoint.without_key(whole(str(model["id"]))) for model in answer["data"]]
    except (aiohttp.ClientError, OSError, *NO_LISTING) as error:
        problem = f"{type(error).__name__} {error}".strip()
        raise ValueError(
            f"{url} does not say which models there are ({_line(problem)}); name one"
        ) from None
    if len(names) != 1:
        raise ValueError(
            f"{url} has {', '.join(map(_line, names)) or 'no model'}; name one of them"
        )
    return names[0]


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def _backoff(attempt: int) -> float:
    """Seconds to wait: longer after each attempt, randomized so that retries do not coincide."""
    longest = min(LONGEST_BACKOFF_S, BACKOFF_S * 2**attempt)
    return float(longest * random.uniform(0.75, 1.0))  # noqa: S311  (changes no result)


def _retry_after(text: str) -> float | None:
    """Seconds of a Retry-After header, which is a number of seconds or a date; None if invalid."""
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        at = parsedate_to_datetime(text)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _error_in(answer: Any) -> Mapping[str, Any]:
    """Error object of an answer, {"message": error} if it is a text; empty if there is none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, dict) else {"message": error} if error else {}


def _read(answer: Any) -> _Answer:
    """Parse a chat completion. Errors: ValueError if it is invalid."""
    try:
        choice = answer["choices"][0]
        text = _text_of(choice["message"]["content"])
        usage = answer.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        reason = choice.get("finish_reason")
        cut, filtered = int(reason == "length"), int(reason == FILTERED)
        spent = replace(_usage(counts), num_cut=cut, num_filtered=filtered)
        return _Answer(text, _count(counts, "total_tokens") or 0, spent)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion: {type(error).__name__} {error}") from error


def _text_of(content: Any) -> str:
    """Return the reply in a message's content: a text, a list of parts, or None for an empty one.
    Errors: TypeError, KeyError for other content.
    """
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] in TEXT_PARTS)
    if not isinstance(content, str | None):
        raise TypeError(f"content is {type(content).__name__}; expected text or a list of parts")
    return whole(content or "")


def _count(counts: Mapping[str, Any], name: str) -> int | None:
    """Return the number of tokens under a key of `usage`; None if it is missing or invalid."""
    value = counts.get(name)
    return value if type(value) is int and 0 <= value < MAX_COUNT else None


def _usage(counts: Mapping[str, Any]) -> Usage:
    """Return the usage of one answered request. counts: `usage` in the answer. A request without
    valid counts is in `num_untold`, one without the number of cached tokens in `num_cache_untold`.
    """
    prompt_tokens = _count(counts, "prompt_tokens")
    completion_tokens = _count(counts, "completion_tokens")
    if prompt_tokens is None or completion_tokens is None:
        return Usage(num_calls=1, num_untold=1)
    details = counts.get("prompt_tokens_details")
    cached = _count(details if isinstance(details, dict) else {}, "cached_tokens")
    return Usage(
        num_calls=1,
        input_tokens=prompt_tokens,
        cached_tokens=min(cached or 0, prompt_tokens),
        output_tokens=completion_tokens,
        num_cache_untold=int(cached is None),
    )
