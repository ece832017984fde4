"""Requests to environment servers: retries that never act twice, and what is asked at once goes
in one.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from agentgym.private import token_of
from envs.plain import whole
from envs.wire import (
    MAX_BATCH,
    BatchReply,
    ErrorKind,
    ErrorReply,
    InfoReply,
    Message,
)

M = TypeVar("M", bound=Message)
Bundle = list[tuple[bytes, asyncio.Future[Message]]]  # requests, and who waits for the answers

BACKOFF_S = 0.05  # before the first retry; doubles
MAX_BACKOFF_S = 5.0  # also the most a server's Retry-After is believed
CLOSE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
BATCHED = ("/step", "/create", "/close")  # what a server that takes batches takes in one
BUNDLES = 2  # under way to one server: it works on one while the answers to the other are read
BUNDLE_BYTES = 96 * 1024  # of one batch, and at most one longest action more
REFUSED_FOR_NOW = (ErrorKind.FULL, ErrorKind.DRAINING, ErrorKind.NOT_READY)


class EnvError(RuntimeError):
    """An environment server failed for good.
    `kind` is an `ErrorKind`, `unreachable` or `protocol`.
    """

    def __init__(self, endpoint: str, route: str, session_id: str, kind: str, message: str) -> None:
        # whoever has the whole id can act in it
        session = f" session {session_id[:8]}" if session_id else ""
        message = whole(message)  # servers are quoted in it
        super().__init__(f"{endpoint}{route}{session}: {kind}: {message}")
        self.endpoint = endpoint
        self.route = route
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:  # it is raised in rollout workers and caught elsewhere
        return _revived, (str(self), self.__dict__)


def _revived(text: str, fields: dict[str, str]) -> EnvError:
    error = EnvError.__new__(EnvError, text)
    error.__dict__.update(fields)
    return error


class Retryable(Exception):
    """A failure after which the same request may be sent again."""

    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class EnvClient:
    """One connection pool to the servers of an environment. Use as `async with`."""

    def __init__(
        self, endpoints: Sequence[str], *, request_timeout_s: float, max_retries: int
    ) -> None:
        self.max_retries = max_retries
        self.hosts: dict[str, str] = {}  # endpoint by address -> the name it was found under
        self.known: dict[str, InfoReply] = {}  # what endpoints were when they were checked
        self._tokens = {urlsplit(endpoint).netloc: token_of(endpoint) for endpoint in endpoints}
        # whether a server will not come back; said by whoever knows where servers are
        self.is_gone: Callable[[str], bool] = lambda endpoint: False
        # a machine that is lost answers nothing, not even that it is not there
        self._timeout = aiohttp.ClientTimeout(
            total=request_timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, request_timeout_s)
        )
        self._http: aiohttp.ClientSession | None = None
        # of servers that take batches: what goes with the next one, and what those under way hold
        self._waiting: defaultdict[str, Bundle] = defaultdict(list)
        self._under_way: defaultdict[str, dict[asyncio.Task[None], Bundle]] = defaultdict(dict)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),  # no server of an environment sets any
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for waiting in self._waiting.values():
            nobody_waits(waiting)
            waiting.clear()
        tasks = [task for own in self._under_way.values() for task in own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def ask(
        self,
        endpoint: str,
        route: str,
        reply: type[M],
        body: Message | None = None,
        *,
        session_id: str = "",
        max_retries: int | None = None,
    ) -> M:
        """One request, repeated after lost connections, timeouts and 503 unless its server is gone.
        Errors: EnvError.
        """
        attempt = 0
        while True:
            try:
                return await self.send(endpoint, route, reply, body, session_id)
            except Retryable as error:
                most = self.max_retries if max_retries is None else max_retries
                if attempt >= most or self.is_gone(endpoint):
                    give_up(endpoint, route, session_id, attempt, error)
                await back_off(attempt, error, nowhere_else=True)
                attempt += 1

    async def send(
        self,
        endpoint: str,
        route: str,
        reply: type[M],
        body: Message | None = None,
        session_id: str = "",
    ) -> M:
        """One request, sent once. Errors: Retryable, EnvError."""
        data = None if body is None else body.model_dump_json().encode()
        if data is not None and route in BATCHED and self._takes_batches(endpoint):
            answer = await self._bundle(endpoint, data)
        else:
            answer = await self._post(endpoint, route, reply, data, session_id)
        if isinstance(answer, reply):
            return answer
        if not isinstance(answer, ErrorReply):
            raise EnvError(
                endpoint, route, session_id, "protocol", f"unexpected body {answer!r:.200}"
            )
        if answer.kind in REFUSED_FOR_NOW:
            raise Retryable(answer.kind, answer.message, answer.retry_after_s or 0.0)
        raise EnvError(endpoint, route, session_id, answer.kind, answer.message)

    def _takes_batches(self, endpoint: str) -> bool:
        return endpoint in self.known and self.known[endpoint].takes_batches

    async def _bundle(self, endpoint: str, data: bytes) -> Message:
        """The answer to one request that goes with others that wait: most of what a quick step
        costs is its way there and back.

        Errors: those of the request it went with.
        """
        loop, waiting = asyncio.get_running_loop(), self._waiting[endpoint]
        answered: asyncio.Future[Message] = loop.create_future()
        waiting.append((data, answered))
        if len(waiting) == 1:
            loop.call_soon(self._send_bundles, endpoint)  # with what else this pass of it asks
        return await answered

    def _send_bundles(self, endpoint: str) -> None:
        """Each half of what is asked and not answered; what is too much for now goes when one of
        them is back.
        """
        waiting, under_way = self._waiting[endpoint], self._under_way[endpoint]
        while waiting and len(under_way) < BUNDLES:
            half = -(-(len(waiting) + sum(map(len, under_way.values()))) // BUNDLES)
            size, count, most = 0, 0, min(len(waiting), half, MAX_BATCH)
            while count < most and size < BUNDLE_BYTES:
                size, count = size + len(waiting[count][0]), count + 1
            bundle, waiting[:count] = waiting[:count], []
            task = asyncio.create_task(self._deliver(endpoint, bundle))
            under_way[task] = bundle
            task.add_done_callback(functools.partial(self._delivered, endpoint))

    def _delivered(self, endpoint: str, task: asyncio.Task[None]) -> None:
        nobody_waits(self._under_way[endpoint].pop(task))  # also where it was ended, or never began
        self._send_bundles(endpoint)

    async def _deliver(self, endpoint: str, bundle: Bundle) -> None:
        """Ask once for all, and hand each its answer; some may have stopped waiting."""
        data = b'{"requests":[' + b",".join(each for each, _ in bundle) + b"]}"
        try:
            reply = await self._post(endpoint, "/batch", BatchReply, data, "")
            answers: Sequence[Message] = (
                [reply] * len(bundle) if isinstance(reply, ErrorReply) else reply.replies
            )
            if len(answers) != len(bundle):
                message = f"{len(answers)} answers to {len(bundle)} requests"
                raise EnvError(endpoint, "/batch", "", "protocol", message)
            for (_, answered), answer in zip(bundle, answers, strict=True):
                if not answered.done():
                    answered.set_result(answer)
        except (EnvError, Retryable) as error:
            for _, answered in bundle:
                if not answered.done():
                    answered.set_exception(error)

    async def _post(
        self, endpoint: str, route: str, reply: type[M], data: bytes | None, session_id: str
    ) -> M | ErrorReply:
        """One request over HTTP. data: None for a GET. Errors: Retryable, EnvError."""
        assert self._http is not None, "use the client as `async with EnvClient(...)`"
        try:
            host = self.hosts.get(endpoint, "")  # it is asked, and has its token, under that name
            headers = request_headers(self._tokens.get(host or urlsplit(endpoint).netloc, ""))
            if host:
                headers["Host"] = host
            method = "GET" if data is None else "POST"
            # no redirect is followed: the token, and what the policy says, are for the servers that
            # were named
            async with self._http.request(
                method, endpoint + route, data=data, headers=headers, allow_redirects=False
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Retryable("unreachable", f"{type(error).__name__} {error}".strip()) from error
        try:
            return (reply if status == 200 else ErrorReply).model_validate_json(content)
        except ValidationError as error:
            start = content[:200].decode(errors="replace")
            raise EnvError(
                endpoint,
                route,
                session_id,
                "protocol",
                f"status {status}, unexpected body {start!r}",
            ) from error


def nobody_waits(bundle: Bundle) -> None:
    """What has no answer by now gets none."""
    for _, answered in bundle:
        answered.cancel()


def backoff_s(attempt: int, first_s: float = BACKOFF_S) -> float:
    """How long to wait before a request is sent again; attempt: from 0."""
    spread = 1 + random.random()  # noqa: S311 - no secret
    return min(first_s * 2.0 ** min(attempt, 10) * spread, MAX_BACKOFF_S)


async def back_off(attempt: int, error: Retryable, *, nowhere_else: bool) -> None:
    """nowhere_else: the next attempt goes to the same server, so its Retry-After counts."""
    wait_s = backoff_s(attempt)
    if error.kind in ("full", "draining") and nowhere_else:
        wait_s = max(wait_s, error.retry_after_s)
    await asyncio.sleep(min(wait_s, MAX_BACKOFF_S))


def request_headers(token: str) -> dict[str, str]:
    """Of every request to an environment server."""
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


def give_up(endpoint: str, route: str, session_id: str, attempt: int, error: Retryable) -> NoReturn:
    """Errors: EnvError, always."""
    raise EnvError(
        endpoint, route, session_id, error.kind, f"{error} (tried {attempt + 1} times)"
    ) from error
