"""Requests to environment servers, and sessions on them. A repeated request never acts twice.
Concurrent requests to one server are sent in few batches, if the server takes batches.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from agentgym.private import token_of
from envs.plain import plain
from envs.wire import (
    MAX_ACTION_CHARS,
    MAX_BATCH,
    TEXTS,
    BatchReply,
    CloseReply,
    CreateReply,
    ErrorKind,
    ErrorReply,
    ExpertReply,
    HintsReply,
    InfoReply,
    Message,
    RenderReply,
    SessionRequest,
    StepReply,
    StepRequest,
)

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Bundle = list[tuple[bytes, asyncio.Future[Message]]]  # requests, and futures of their answers

BACKOFF_S = 0.05  # before the first retry; doubles
MAX_BACKOFF_S = 5.0  # also the longest wait that a server's Retry-After causes
CLOSE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
BATCHED = ("/step", "/create", "/close")  # routes whose requests a batch may contain
BUNDLES = 2  # batches in flight to a server: it works on one while we read the other's answers
BUNDLE_BYTES = 96 * 1024  # size of one batch; its last action may exceed this
REFUSED_FOR_NOW = (ErrorKind.FULL, ErrorKind.DRAINING, ErrorKind.NOT_READY)


class EnvError(RuntimeError):
    """Failed request to an environment server.
    `kind` is an `ErrorKind`, `unreachable`, `protocol` (unexpected answer), `mismatch` (the server
    differs from the others) or `fleet` (the environment's servers may not be used any more).
    """

    def __init__(self, endpoint: str, route: str, session_id: str, kind: str, message: str) -> None:
        self.endpoint, self.route, self.kind, self.message = endpoint, route, kind, plain(message)
        # shorten the id, because the whole one is a credential for the session
        super().__init__(endpoint, route, session_id[:8], kind, self.message)

    def __str__(self) -> str:
        session = f" session {self.args[2]}" if self.args[2] else ""
        return f"{self.endpoint}{self.route}{session}: {self.kind}: {self.message}"


class Retryable(Exception):
    """A failure after which the same request may be sent again.
    retry_after_s: the server's Retry-After, 0 if it gave none.
    """

    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.retry_after_s = kind, retry_after_s


class EnvClient:
    """HTTP client of the servers of one environment. Use as `async with`: the end of the block
    cancels batched requests that have no answer yet.
    """

    def __init__(
        self, endpoints: Sequence[str], *, request_timeout_s: float, max_retries: int
    ) -> None:
        self.max_retries = max_retries
        self.hosts: dict[str, str] = {}  # endpoint by address -> host name that resolved to it
        self.known: dict[str, InfoReply] = {}  # endpoint -> its /info when it was checked
        self._tokens = {urlsplit(endpoint).netloc: token_of(endpoint) for endpoint in endpoints}
        # True for a server that will not come back; the balancer replaces this function
        self.is_gone: Callable[[str], bool] = lambda endpoint: False
        # a dead host sends no RST: bound the connect time
        self._timeout = aiohttp.ClientTimeout(
            total=request_timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, request_timeout_s)
        )
        self._http: aiohttp.ClientSession | None = None
        # for servers that take batches: requests for the next batch, and the batches in flight
        self._waiting: defaultdict[str, Bundle] = defaultdict(list)
        self._under_way: defaultdict[str, dict[asyncio.Task[None], Bundle]] = defaultdict(dict)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),  # no environment server sets cookies
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for waiting in self._waiting.values():
            nobody_waits(waiting)
        self._waiting.clear()
        tasks = [task for bundles in self._under_way.values() for task in bundles]
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
        """Send one request and return its answer. Repeat it, at most `max_retries` times, if the
        server is not reached, full, draining, not ready or too slow, unless it is gone for good.
        reply: model of the answer. body: None for a GET. max_retries: None for the client's.
        session_id: for the error's text. Errors: EnvError.
        """
        attempt = 0
        while True:
            try:
                return await self.send(endpoint, route, reply, body, session_id)
            except Retryable as error:
                limit = self.max_retries if max_retries is None else max_retries
                if attempt >= limit or self.is_gone(endpoint):
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
        """Send one request once, perhaps in a batch, and return its answer; arguments as in `ask`.
        Errors: Retryable if it may be sent again, else EnvError.
        """
        data = None if body is None else body.model_dump_json().encode()
        known = self.known.get(endpoint)
        if data is not None and route in BATCHED and known is not None and known.takes_batches:
            answer = await self._bundle(endpoint, data)
        else:
            answer = await self._post(endpoint, route, reply, data, session_id)
        if isinstance(answer, reply):
            return answer
        if not isinstance(answer, ErrorReply):
            message = f"unexpected body {answer!r:.200}"
            raise EnvError(endpoint, route, session_id, "protocol", message)
        if answer.kind in REFUSED_FOR_NOW:
            raise Retryable(answer.kind, answer.message, answer.retry_after_s or 0.0)
        raise EnvError(endpoint, route, session_id, answer.kind, answer.message)

    async def _bundle(self, endpoint: str, data: bytes) -> Message:
        """Send a request in the server's next batch and return its answer, perhaps an ErrorReply.
        One round trip for many requests saves most of the time of a quick step.
        data: the request as JSON. Errors: Retryable or EnvError if the whole batch failed.
        """
        loop, waiting = asyncio.get_running_loop(), self._waiting[endpoint]
        answered: asyncio.Future[Message] = loop.create_future()
        waiting.append((data, answered))
        if len(waiting) == 1:
            # later: with the other requests of this pass of the event loop
            loop.call_soon(self._send_bundles, endpoint)
        return await answered

    def _send_bundles(self, endpoint: str) -> None:
        """Start to send the waiting requests in at most BUNDLES batches at a time, each of about
        half the unanswered requests, MAX_BATCH and about BUNDLE_BYTES at most; the rest waits until
        a batch has returned.
        """
        waiting, under_way = self._waiting[endpoint], self._under_way[endpoint]
        while waiting and len(under_way) < BUNDLES:
            half = -(-(len(waiting) + sum(map(len, under_way.values()))) // BUNDLES)
            size, count, limit = 0, 0, min(len(waiting), half, MAX_BATCH)
            while count < limit and size < BUNDLE_BYTES:
                size, count = size + len(waiting[count][0]), count + 1
            bundle, waiting[:count] = waiting[:count], []
            task = asyncio.create_task(self._deliver(endpoint, bundle))
            under_way[task] = bundle
            task.add_done_callback(functools.partial(self._delivered, endpoint))

    def _delivered(self, endpoint: str, task: asyncio.Task[None]) -> None:
        nobody_waits(self._under_way[endpoint].pop(task))  # the task may have been cancelled
        self._send_bundles(endpoint)

    async def _deliver(self, endpoint: str, bundle: Bundle) -> None:
        """Send the bundle once and resolve its futures, except cancelled ones: with the answers or,
        if the request fails, with its error.
        """
        data = b'{"requests":[' + b",".join(request for request, _ in bundle) + b"]}"
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
        """Send one request over HTTP and return the answer, an ErrorReply unless its status is 200.
        data: None for a GET. Errors: Retryable if the connection fails or the time limit passes;
        EnvError for an unexpected body.
        """
        assert self._http is not None, "use the client as `async with EnvClient(...)`"
        try:
            host = self.hosts.get(endpoint, "")  # the Host header, and the key of its token
            headers = request_headers(self._tokens.get(host or urlsplit(endpoint).netloc, ""))
            if host:
                headers["Host"] = host
            method = "GET" if data is None else "POST"
            # follow no redirect: the token and the policy's text are for the configured servers
            async with self._http.request(
                method, endpoint + route, data=data, headers=headers, allow_redirects=False
            ) as response:
                content, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Retryable("unreachable", f"{type(error).__name__} {error}".strip()) from error
        try:
            return (reply if status == 200 else ErrorReply).model_validate_json(content)
        except ValidationError as error:
            start = content[:200].decode(errors="replace")
            message = f"status {status}, unexpected body {start!r}"
            raise EnvError(endpoint, route, session_id, "protocol", message) from error


class EnvSession:
    """One open episode on a server. One coroutine at a time may use it."""

    def __init__(self, client: EnvClient, endpoint: str, reply: CreateReply) -> None:
        self.endpoint = endpoint
        self.observation = reply.observation  # the latest
        self.turn = 0  # number of the last action that was answered
        self._client, self._id = client, reply.session_id
        self._as_request = SessionRequest(session_id=reply.session_id)

    async def step(self, action: str) -> StepReply:
        """Act once, however often the request has to be sent, and return the answer; update `turn`
        and `observation`. action: cut by `sendable`. Errors: EnvError.
        """
        request = StepRequest(session_id=self._id, turn=self.turn + 1, action=sendable(action))
        reply = await self._ask("/step", StepReply, request)
        self.turn, self.observation = reply.turn, reply.observation
        return reply

    async def expert(self) -> str:
        """Return the action of the server's expert.
        Errors: EnvError, kind `expert_failed` if the expert has no answer.
        """
        return (await self._ask("/expert", ExpertReply, self._as_request)).action

    async def hints(self) -> list[str]:
        """Return actions that the environment suggests now. Others may be possible, and a suggested
        one may have no effect.
        Errors: EnvError, also for an environment that does not offer hints.
        """
        return (await self._ask(f"/hints?session_id={self._id}", HintsReply)).actions

    async def render(self) -> tuple[str, bytes]:
        """Return a picture or text of the present state: (media type, bytes). Errors: EnvError."""
        reply = await self._ask(f"/render?session_id={self._id}", RenderReply)
        is_text = reply.media_type in TEXTS
        data = reply.data.encode() if is_text else base64.b64decode(reply.data)
        return reply.media_type, data

    async def close(self) -> None:
        """Close the session, tried once. A failure is only logged: servers end idle sessions."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._ask("/close", CloseReply, self._as_request, max_retries=0)
        except (EnvError, TimeoutError) as error:
            logger.info("session left to the server's reaper: %s", error)

    async def _ask(
        self, route: str, reply: type[M], body: Message | None = None, **options: int
    ) -> M:
        return await self._client.ask(
            self.endpoint, route, reply, body, session_id=self._id, **options
        )


def nobody_waits(bundle: Bundle) -> None:
    """Cancel the futures of a bundle that have no answer yet."""
    for _, answered in bundle:
        answered.cancel()


def backoff_s(attempt: int, first_s: float = BACKOFF_S) -> float:
    """Seconds to wait before a request is sent again: at random `first_s` to twice that, doubled
    with each attempt, at most MAX_BACKOFF_S. attempt: from 0.
    """
    spread = 1 + random.random()  # noqa: S311 - no secret
    return min(first_s * 2.0 ** min(attempt, 10) * spread, MAX_BACKOFF_S)


async def back_off(attempt: int, error: Retryable, *, nowhere_else: bool) -> None:
    """Wait before the next attempt, see `backoff_s`. error: the failure of the last attempt.
    nowhere_else: True if the next attempt goes to the same server. If this is full or draining,
    wait for its Retry-After, too, but never longer than MAX_BACKOFF_S.
    """
    wait_s = backoff_s(attempt)
    if error.kind in ("full", "draining") and nowhere_else:
        wait_s = max(wait_s, error.retry_after_s)
    await asyncio.sleep(min(wait_s, MAX_BACKOFF_S))


def request_headers(token: str) -> dict[str, str]:
    """Headers of every request to an environment server. token: empty if it needs none."""
    headers = {"Content-Type": "application/json"}
    return headers | {"Authorization": f"Bearer {token}"} if token else headers


def give_up(endpoint: str, route: str, session_id: str, attempt: int, error: Retryable) -> NoReturn:
    """Raise EnvError after the last attempt failed with `error`. attempt: its number, from 0."""
    message = f"{error} (tried {attempt + 1} times)"
    raise EnvError(endpoint, route, session_id, error.kind, message) from error


def sendable(action: str) -> str:
    """Return an action cut to MAX_ACTION_CHARS, the most that an environment reads, with `?` for
    lone surrogates.
    """
    return action[:MAX_ACTION_CHARS].encode("utf-8", "replace").decode()
