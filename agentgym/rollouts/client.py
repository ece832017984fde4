"""Sessions on environment servers: one connection pool, retries that never act twice, and the
choice of a server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from agentgym.config import ConfigError, EnvConfig
from agentgym.types import Endpoint, Item
from envs.wire import (
    MAX_ACTION_CHARS,
    MAX_BATCH,
    PROTOCOL_VERSION,
    TOKEN_VARIABLE,
    BatchReply,
    CloseReply,
    CreateReply,
    CreateRequest,
    ErrorKind,
    ErrorReply,
    ExpertReply,
    InfoReply,
    Message,
    ReadyReply,
    RenderReply,
    SessionRequest,
    StepReply,
    StepRequest,
)

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
Endpoints = Mapping[str, Sequence[str]]  # environment -> URLs of its servers

BACKOFF_S = 0.05  # before the first retry; doubles
MAX_BACKOFF_S = 5.0  # also the most a server's Retry-After is believed
LOAD_AGE_S = 1.0  # how old a server's reported load may be
CLOSE_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 10.0  # of one request before a run begins
BATCHED = ("/step", "/create", "/close")  # what a server that takes batches takes in one
BUNDLE_BYTES = 96 * 1024  # of one batch, and at most one longest action more
REFUSED_FOR_NOW = (ErrorKind.FULL, ErrorKind.DRAINING, ErrorKind.NOT_READY)
RESOLVE_S = 30.0  # how long the addresses of a host name are believed


class EnvError(RuntimeError):
    """An environment server failed for good.
    `kind` is an `ErrorKind`, `unreachable` or `protocol`.
    """

    def __init__(self, endpoint: str, route: str, session_id: str, kind: str, message: str) -> None:
        # whoever has the whole id can act in it
        session = f" session {session_id[:8]}" if session_id else ""
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


class _Retryable(Exception):
    """A failure after which the same request may be sent again."""

    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class EnvSession:
    """One open episode. One coroutine at a time uses it."""

    def __init__(self, pool: EnvPool, endpoint: str, reply: CreateReply) -> None:
        self.endpoint = endpoint
        self.observation = reply.observation  # the latest
        self.turn = 0  # number of the last action that was answered
        self._pool = pool
        self._id = reply.session_id
        self._as_request = SessionRequest(session_id=reply.session_id)

    async def step(self, action: str) -> StepReply:
        """Act once, however often the request has to be sent.
        Characters beyond the wire's limit are cut: no environment reads so far.

        Errors: EnvError.
        """
        text = action[:MAX_ACTION_CHARS].encode("utf-8", "replace").decode()
        request = StepRequest(session_id=self._id, turn=self.turn + 1, action=text)
        reply = await self._pool.ask(
            self.endpoint, "/step", StepReply, request, session_id=self._id
        )
        self.turn = reply.turn
        self.observation = reply.observation
        return reply

    async def expert(self) -> str:
        """What the server's expert would do now.
        Errors: EnvError, kind `expert_failed` where it has no answer.
        """
        return (
            await self._pool.ask(
                self.endpoint, "/expert", ExpertReply, self._as_request, session_id=self._id
            )
        ).action

    async def render(self) -> tuple[str, bytes]:
        """(media type, bytes) of the present state. Errors: EnvError."""
        reply = await self._pool.ask(
            self.endpoint, f"/render?session_id={self._id}", RenderReply, session_id=self._id
        )
        return reply.media_type, (
            reply.data.encode()
            if reply.media_type == "text/plain"
            else base64.b64decode(reply.data)
        )

    async def close(self) -> None:
        """Best effort, tried once: the server reaps what is left behind."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pool.ask(
                    self.endpoint,
                    "/close",
                    CloseReply,
                    self._as_request,
                    session_id=self._id,
                    max_retries=0,
                )
        except (EnvError, TimeoutError) as error:
            logger.info("session left to the server's reaper: %s", error)


class EnvPool:
    """Servers of one environment, which may come and go. Use as `async with`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        request_timeout_s: float,
        max_retries: int = 4,
        patience_s: float = 20.0,
    ) -> None:
        """endpoints: URLs; a host name with several addresses stands for a server at each, and is
        looked up again and again.

        patience_s: while no server of the pool opens a session, `session` tries at least so long:
        one may be restarting.
        """
        if not endpoints:
            raise ValueError(
                "no environment server given; name at least one endpoint such as"
                " http://127.0.0.1:8000"
            )
        self._configured = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self.endpoints = self._configured  # as last looked up
        self._tokens = {urlsplit(endpoint).netloc: token_of(endpoint) for endpoint in endpoints}
        self._hosts: dict[str, str] = {}  # endpoint by address -> the name it was found under
        self._resolved_at = -RESOLVE_S
        self._checked: dict[str, InfoReply] = {}  # what endpoints were when they were checked
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._max_retries = max_retries
        self._patience_s = patience_s
        self._refused_since: float | None = None  # when the pool last stopped opening sessions
        self._http: aiohttp.ClientSession | None = None
        # of servers that take batches: what goes with the next one, and those under way
        self._waiting: defaultdict[str, list[tuple[bytes, asyncio.Future[Message]]]]
        self._waiting = defaultdict(list)
        self._bundles: set[asyncio.Task[None]] = set()
        self._random = random.SystemRandom()  # which server answers changes no result
        # open sessions; inf where the server takes none
        self._load: defaultdict[str, float] = defaultdict(float)
        self._load_seen_at: defaultdict[str, float] = defaultdict(float)

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
        for task in self._bundles:
            task.cancel()
        await asyncio.gather(*self._bundles, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def check(self, env: EnvConfig, *, allow_expert: bool) -> str:
        """Refuse servers that are not what the run was configured for; those that come later are
        held to the same.

        Result: the task manual. Errors: as `check_endpoints`.
        """
        await self._resolve()
        found = await check_endpoints(
            self, expect_env=env.name, allow_expert=allow_expert, expect_options=env.options
        )
        self._checked = dict(zip(self.endpoints, found, strict=True))
        return found[0].instructions

    async def info(self) -> list[InfoReply]:
        """What each endpoint is, in the order given. Errors: EnvError."""
        return list(
            await asyncio.gather(
                *(self.ask(endpoint, "/info", InfoReply) for endpoint in self.endpoints)
            )
        )

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> AsyncIterator[EnvSession]:
        """An open session on the item, closed at the end.
        Equal keys mean the same session: use a key once.

        Errors: EnvError.
        """
        endpoint, reply = await self._create(
            CreateRequest(request_key=request_key, task_id=item.task_id)
        )
        self._load[endpoint] += 1
        session = EnvSession(self, endpoint, reply)
        try:
            yield session
        finally:
            self._load[endpoint] -= 1
            await session.close()

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
        """One request, repeated after lost connections, timeouts and 503. Errors: EnvError."""
        attempt = 0
        while True:
            try:
                return await self._send(endpoint, route, reply, body, session_id)
            except _Retryable as error:
                if attempt >= (self._max_retries if max_retries is None else max_retries):
                    _give_up(endpoint, route, session_id, attempt, error)
                await self._back_off(attempt, error)
                attempt += 1

    async def _create(self, request: CreateRequest) -> tuple[str, CreateReply]:
        """A server that is full, draining or unreachable is left for another one; where all are,
        they are waited for.

        A lost reply may leave a session behind on the server left: its reaper ends it, and nothing
        ever acts in it.
        """
        attempt = 0
        while True:
            endpoint = await self._choose()
            try:
                reply = await self._send(endpoint, "/create", CreateReply, request, "")
                self._refused_since = None
                return endpoint, reply
            except _Retryable as error:
                now = time.monotonic()
                self._load[endpoint], self._load_seen_at[endpoint] = float("inf"), now
                self._refused_since = self._refused_since or now
                if attempt >= self._max_retries and now - self._refused_since >= self._patience_s:
                    _give_up(endpoint, "/create", "", attempt, error)
                await self._back_off(attempt, error)
                attempt += 1

    async def _choose(self) -> str:
        """The less loaded of two servers drawn at random.
        Errors: EnvError where it has come since the check and is another one.
        """
        await self._resolve()
        pair = self._random.sample(self.endpoints, min(2, len(self.endpoints)))
        if len(pair) > 1:
            await asyncio.gather(*(self._refresh_load(endpoint) for endpoint in pair))
        chosen = min(pair, key=self._load.__getitem__)
        if self._checked and chosen not in self._checked:
            await self._check_newcomer(chosen)
        return chosen

    async def _resolve(self) -> None:
        """Look host names up, at most once in RESOLVE_S. One that cannot be found keeps the
        addresses it had.
        """
        if time.monotonic() - self._resolved_at < RESOLVE_S:
            return
        self._resolved_at = time.monotonic()
        found: dict[str, str] = {}  # endpoint -> name it was found under, where that is another
        for endpoint in self._configured:
            parts = urlsplit(endpoint)
            addresses: set[tuple[str, int]] = set()
            if parts.scheme == "http" and parts.hostname and not _is_address(parts.hostname):
                with contextlib.suppress(OSError):
                    rows = await asyncio.get_running_loop().getaddrinfo(
                        parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                    )
                    addresses = {
                        (
                            f"[{row[4][0]}]" if row[0] is socket.AF_INET6 else str(row[4][0]),
                            int(row[4][1]),
                        )
                        for row in rows
                    }
                if not addresses:
                    logger.warning(
                        "%s cannot be found; going on with the addresses known so far",
                        parts.hostname,
                    )
                    found |= {
                        known: name for known, name in self._hosts.items() if name == parts.netloc
                    } or {endpoint: ""}
                    continue
            if len(addresses) < 2:
                found[endpoint] = ""
            else:
                found |= {
                    f"http://{host}:{port}{parts.path}": parts.netloc
                    for host, port in sorted(addresses)
                }
        self._hosts = {endpoint: name for endpoint, name in found.items() if name}
        if set(found) != set(self.endpoints):
            logger.info("environment servers are now %s", ", ".join(found))
        self.endpoints = tuple(found)

    async def _check_newcomer(self, endpoint: str) -> None:
        expected, info = (
            next(iter(self._checked.values())),
            await self.ask(endpoint, "/info", InfoReply),
        )
        for name in ("env", "options", "protocol_version", "offers_expert", "instructions"):
            if getattr(info, name) != getattr(expected, name):
                message = (
                    f"a server that came later has {name}={getattr(info, name)!r:.200}, the others"
                    f" {getattr(expected, name)!r:.200}"
                )
                raise EnvError(endpoint, "/info", "", "mismatch", f"{message}; make them equal")
        self._checked[endpoint] = info

    async def _refresh_load(self, endpoint: str) -> None:
        """Ask at most once in LOAD_AGE_S; in between our own sessions are counted on top."""
        now = time.monotonic()
        if now - self._load_seen_at[endpoint] < LOAD_AGE_S:
            return
        self._load_seen_at[endpoint] = now
        try:
            ready = await self._send(endpoint, "/readyz", ReadyReply, None, "")
            self._load[endpoint] = float(ready.active_sessions)
        except (_Retryable, EnvError) as error:
            if self._load[endpoint] != float("inf"):
                logger.warning("%s takes no sessions: %s", endpoint, error)
            self._load[endpoint] = float("inf")

    async def _send(
        self, endpoint: str, route: str, reply: type[M], body: Message | None, session_id: str
    ) -> M:
        """Errors: _Retryable, EnvError."""
        known = self._checked.get(endpoint)
        data = None if body is None else body.model_dump_json().encode()
        if data is not None and known and known.takes_batches and route in BATCHED:
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
            raise _Retryable(answer.kind, answer.message, answer.retry_after_s or 0.0)
        raise EnvError(endpoint, route, session_id, answer.kind, answer.message)

    async def _bundle(self, endpoint: str, data: bytes) -> Message:
        """The answer to one request that goes with all others of this pass of the event loop:
        most of what a quick step costs is its way there and back.

        Errors: those of the request it went with.
        """
        loop, waiting = asyncio.get_running_loop(), self._waiting[endpoint]
        answered: asyncio.Future[Message] = loop.create_future()
        waiting.append((data, answered))
        if len(waiting) == 1:
            loop.call_soon(self._send_bundles, endpoint)
        return await answered

    def _send_bundles(self, endpoint: str) -> None:
        waiting = self._waiting.pop(endpoint)
        while waiting:
            size, count = 0, 0
            while count < min(len(waiting), MAX_BATCH) and size < BUNDLE_BYTES:
                size, count = size + len(waiting[count][0]), count + 1
            task = asyncio.create_task(self._deliver(endpoint, waiting[:count]))
            self._bundles.add(task)
            task.add_done_callback(self._bundles.discard)
            del waiting[:count]

    async def _deliver(
        self, endpoint: str, bundle: Sequence[tuple[bytes, asyncio.Future[Message]]]
    ) -> None:
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
        except (EnvError, _Retryable) as error:
            for _, answered in bundle:
                if not answered.done():
                    answered.set_exception(error)
        finally:  # where the pool closes, nobody is left waiting
            for _, answered in bundle:
                answered.cancel()

    async def _post(
        self, endpoint: str, route: str, reply: type[M], data: bytes | None, session_id: str
    ) -> M | ErrorReply:
        """One request over HTTP. data: None for a GET. Errors: _Retryable, EnvError."""
        assert self._http is not None, "use the pool as `async with EnvPool(...)`"
        try:
            host = self._hosts.get(endpoint, "")  # it is asked, and has its token, under that name
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
            raise _Retryable("unreachable", f"{type(error).__name__} {error}".strip()) from error
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

    async def _back_off(self, attempt: int, error: _Retryable) -> None:
        wait_s = backoff_s(attempt)
        if error.kind in ("full", "draining") and len(self.endpoints) == 1:
            wait_s = max(wait_s, error.retry_after_s)
        await asyncio.sleep(min(wait_s, MAX_BACKOFF_S))


class AnyPool(Protocol):
    """Servers of one environment, of whichever dialect."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]: ...
    async def check(self, env: EnvConfig, *, allow_expert: bool) -> str: ...


class EnvPools:
    """The servers of every environment of a run. Use as `async with`."""

    def __init__(self, pools: Mapping[str, AnyPool]) -> None:
        """pools: by environment, not entered yet."""
        self._pools = pools
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for pool in self._pools.values():
            await self._stack.enter_async_context(pool)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @classmethod
    def of(cls, envs: Sequence[EnvConfig], endpoints: Endpoints) -> Self:
        """endpoints: those of the configuration, of its dialect, or servers of ours."""
        return cls({env.name: _pool(env, endpoints[env.name]) for env in envs})

    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]:
        """As `EnvPool.session`, of the item's environment."""
        return self._pools[item.env].session(item, request_key)

    async def check(self, envs: Sequence[EnvConfig], *, allow_expert: bool) -> dict[str, str]:
        """Refuse servers that are not what the run was configured for.
        Result: environment -> its task manual.

        Errors: as `check_endpoints`.
        """
        return {
            env.name: await self._pools[env.name].check(env, allow_expert=allow_expert)
            for env in envs
        }


def _pool(env: EnvConfig, endpoints: Sequence[str], **settings: Any) -> AnyPool:
    settings = {"request_timeout_s": env.request_timeout_s, **settings}
    if set(endpoints) != set(env.endpoints):  # servers of ours
        return EnvPool(endpoints, **settings)
    if env.dialect == "agentgym":
        from agentgym.rollouts.dialect import AgentGymPool

        return AgentGymPool(env.name, endpoints, **settings)
    if env.dialect == "openenv":
        from agentgym.rollouts.openenv import OpenEnvPool

        return OpenEnvPool(endpoints, **settings)
    return EnvPool(endpoints, **settings)


def token_of(endpoint: str) -> str:
    """What this server asks for: a server of ours its own, a configured one what this process's
    environment says.

    No file or log ever has either, and neither is sent to the other kind.
    """
    return (
        endpoint.token
        if isinstance(endpoint, Endpoint)
        else os.environ.get(TOKEN_VARIABLE, "").strip()
    )


def backoff_s(attempt: int, first_s: float = BACKOFF_S) -> float:
    """How long to wait before a request is sent again; attempt: from 0."""
    spread = 1 + random.random()  # noqa: S311 - no secret
    return min(first_s * 2.0 ** min(attempt, 10) * spread, MAX_BACKOFF_S)


def request_headers(token: str) -> dict[str, str]:
    """Of every request to an environment server."""
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


async def check_endpoints(
    pool: EnvPool,
    *,
    expect_env: str,
    allow_expert: bool,
    expect_options: dict[str, Any] | None = None,
) -> list[InfoReply]:
    """Refuse servers that are not what the run was configured for.

    expect_options: the configured options; each must be served with this value.
    Errors: EnvError; ValueError naming the endpoint.
    """
    try:
        replies = await pool.info()
    except EnvError as error:
        if error.kind == "unreachable":
            raise EnvError(
                error.endpoint,
                error.route,
                "",
                error.kind,
                f"{error.message}; expected a {expect_env} server there: start it (python -m envs"
                f" serve {expect_env} --port PORT), or correct env.endpoints (empty: one is started"
                " on this machine). Nothing committed is lost: the same command goes on",
            ) from error
        raise
    for endpoint, info in zip(pool.endpoints, replies, strict=True):
        if info.protocol_version != PROTOCOL_VERSION:
            raise ValueError(
                f"{endpoint} speaks protocol version {info.protocol_version}, this client"
                f" {PROTOCOL_VERSION}; update the older one"
            )
        if info.env != expect_env:
            raise ValueError(
                f"{endpoint} serves {info.env!r}, but env.name is {expect_env!r}; correct"
                " env.endpoints or env.name"
            )
        if info.offers_expert and not allow_expert:
            raise ValueError(
                f"{endpoint} offers the expert, so a policy under training could ask it; start the"
                " server without --expert"
            )
        if info.options != replies[0].options:
            raise ValueError(
                f"{endpoint} serves options {info.options}, {pool.endpoints[0]} serves"
                f" {replies[0].options}; make them equal"
            )
        for key, value in (expect_options or {}).items():
            if info.options.get(key) != value:
                raise ValueError(
                    f"{endpoint} serves {key}={info.options.get(key)!r}, but env.options.{key} is"
                    f" {value!r}; make them equal"
                )
    return replies


def check_env_servers(env: EnvConfig) -> None:
    """Ask the configured endpoints, where there are any, before a run begins.

    Errors: EnvError where one does not answer, ConfigError where it is not what the run was
    configured for.
    """

    async def ask() -> None:
        async with _pool(
            env,
            env.endpoints,
            request_timeout_s=min(env.request_timeout_s, CHECK_TIMEOUT_S),
            max_retries=2,
        ) as pool:
            await pool.check(env, allow_expert=False)

    if env.endpoints:
        try:
            asyncio.run(ask())
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _is_address(host: str) -> bool:
    """True for what need not be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _give_up(
    endpoint: str, route: str, session_id: str, attempt: int, error: _Retryable
) -> NoReturn:
    raise EnvError(
        endpoint, route, session_id, error.kind, f"{error} (tried {attempt + 1} times)"
    ) from error
