"""Sessions on the environment servers of a run, in any protocol."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from agentgym.config import ConfigError, EnvConfig
from agentgym.rollouts.balancing import Balancer
from agentgym.rollouts.env_client import (
    CLOSE_TIMEOUT_S,
    EnvClient,
    EnvError,
    Retryable,
    back_off,
    give_up,
)
from agentgym.rollouts.guide import Guide
from agentgym.types import Endpoints, Item
from envs.wire import (
    MAX_ACTION_CHARS,
    PROTOCOL_VERSION,
    TEXTS,
    CloseReply,
    CreateReply,
    CreateRequest,
    ExpertReply,
    HintsReply,
    InfoReply,
    RenderReply,
    SessionRequest,
    StepReply,
    StepRequest,
)

logger = logging.getLogger(__name__)

FLEET_PATIENCE_S = 180.0  # a lost pod is recreated elsewhere within this time
CHECK_TIMEOUT_S = 10.0  # of one request before a run begins


class EnvSession:
    """One open episode. One coroutine at a time uses it."""

    def __init__(self, client: EnvClient, endpoint: str, reply: CreateReply) -> None:
        self.endpoint = endpoint
        self.observation = reply.observation  # the latest
        self.turn = 0  # number of the last action that was answered
        self._client = client
        self._id = reply.session_id
        self._as_request = SessionRequest(session_id=reply.session_id)

    async def step(self, action: str) -> StepReply:
        """Act once, however often the request has to be sent, and return the answer.
        Text beyond MAX_ACTION_CHARS is cut: no environment reads that far.

        Errors: EnvError.
        """
        text = action[:MAX_ACTION_CHARS].encode("utf-8", "replace").decode()
        request = StepRequest(session_id=self._id, turn=self.turn + 1, action=text)
        reply = await self._client.ask(
            self.endpoint, "/step", StepReply, request, session_id=self._id
        )
        self.turn = reply.turn
        self.observation = reply.observation
        return reply

    async def expert(self) -> str:
        """Return the action of the server's expert.
        Errors: EnvError, kind `expert_failed` if the expert has no answer.
        """
        return (
            await self._client.ask(
                self.endpoint, "/expert", ExpertReply, self._as_request, session_id=self._id
            )
        ).action

    async def hints(self) -> list[str]:
        """Return the actions the simulator would carry out now.
        Errors: EnvError, also for an environment that does not list them.
        """
        path = f"/hints?session_id={self._id}"
        reply = await self._client.ask(self.endpoint, path, HintsReply, session_id=self._id)
        return reply.actions

    async def render(self) -> tuple[str, bytes]:
        """Return (media type, bytes) of the present state. Errors: EnvError."""
        reply = await self._client.ask(
            self.endpoint, f"/render?session_id={self._id}", RenderReply, session_id=self._id
        )
        is_text = reply.media_type in TEXTS
        data = reply.data.encode() if is_text else base64.b64decode(reply.data)
        return reply.media_type, data

    async def close(self) -> None:
        """Close the session, tried once; a failure is only logged: the server reaps the session."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.ask(
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
        """Prepare a pool.

        endpoints: URLs. A host name with several addresses stands for a server at each address and
        is looked up repeatedly.
        patience_s: while no server of the pool opens a session, `session` keeps trying for at
        least this long: a server may be restarting.
        Errors: ValueError without an endpoint.
        """
        if not endpoints:
            raise ValueError(
                "no environment server given; name at least one endpoint such as"
                " http://127.0.0.1:8000"
            )
        self.client = EnvClient(
            endpoints, request_timeout_s=request_timeout_s, max_retries=max_retries
        )
        self._balancer = Balancer(endpoints, self.client)
        self._patience_s = patience_s
        self._refused_since: float | None = None  # when the pool last stopped opening sessions

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of the servers as last looked up."""
        return self._balancer.endpoints

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.client.__aexit__(kind, error, trace)

    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide:
        """Refuse servers that do not match the configuration; later ones must match these.

        Result: instructions and worked examples. Errors: as `check_endpoints`.
        """
        await self._balancer.resolve()
        replies = await check_endpoints(
            self, expect_env=env.name, allow_expert=allow_expert, expect_options=env.options
        )
        self.client.known = dict(zip(self.endpoints, replies, strict=True))
        return Guide(replies[0].instructions, replies[0].examples)

    async def info(self) -> list[InfoReply]:
        """Return each endpoint's /info, in the order of `endpoints`. Errors: EnvError."""
        return list(
            await asyncio.gather(
                *(self.client.ask(endpoint, "/info", InfoReply) for endpoint in self.endpoints)
            )
        )

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> AsyncIterator[EnvSession]:
        """Yield an open session on the item, closed at the end.
        Equal keys mean the same session: use a key only once.

        Errors: EnvError.
        """
        endpoint, reply = await self._create(
            CreateRequest(request_key=request_key, task_id=item.task_id)
        )
        self._balancer.load[endpoint] += 1
        session = EnvSession(self.client, endpoint, reply)
        try:
            yield session
        finally:
            self._balancer.load[endpoint] -= 1
            await session.close()

    async def _create(self, request: CreateRequest) -> tuple[str, CreateReply]:
        """Open a session on some server. If one is full, draining or unreachable, try another; if
        all are, wait and retry.

        A lost reply may leave an unused session on a server, which its reaper ends.
        """
        attempt = 0
        while True:
            endpoint = await self._balancer.choose()
            try:
                reply = await self.client.send(endpoint, "/create", CreateReply, request)
                self._refused_since = None
                return endpoint, reply
            except Retryable as error:
                now = time.monotonic()
                self._balancer.avoid(endpoint)
                self._refused_since = self._refused_since or now
                if (
                    attempt >= self.client.max_retries
                    and now - self._refused_since >= self._patience_s
                ):
                    give_up(endpoint, "/create", "", attempt, error)
                await back_off(attempt, error, nowhere_else=len(self.endpoints) == 1)
                attempt += 1


class AnyPool(Protocol):
    """Servers of one environment, in any dialect."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]: ...
    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide: ...


class EnvPools:
    """The servers of every environment of a run. Use as `async with`."""

    def __init__(self, pools: Mapping[str, AnyPool]) -> None:
        """Prepare the pools. pools: by environment, not entered yet."""
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
        """Make the pool of each environment.
        endpoints: the configured ones, which speak the configured dialect, or servers of ours.
        """
        return cls({env.name: _pool(env, endpoints[env.name]) for env in envs})

    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]:
        """Return a context with a session of the item's environment, see `EnvPool.session`."""
        return self._pools[item.env].session(item, request_key)

    async def check(self, envs: Sequence[EnvConfig], *, allow_expert: bool) -> dict[str, Guide]:
        """Refuse servers that do not match the configuration.
        Result: environment -> its guide.

        Errors: as `check_endpoints`.
        """
        return {
            env.name: await self._pools[env.name].check(env, allow_expert=allow_expert)
            for env in envs
        }


def _pool(env: EnvConfig, endpoints: Sequence[str], **settings: Any) -> AnyPool:
    settings = {"request_timeout_s": env.request_timeout_s, **settings}
    if env.deploy == "kubernetes":
        settings["patience_s"] = FLEET_PATIENCE_S
    if set(endpoints) != set(env.endpoints):  # our own servers
        return EnvPool(endpoints, **settings)
    if env.dialect == "agentgym":
        from agentgym.rollouts.agentgym_client import AgentGymPool

        return AgentGymPool(env.name, endpoints, **settings)
    if env.dialect == "openenv":
        from agentgym.rollouts.openenv_client import OpenEnvPool

        return OpenEnvPool(endpoints, **settings)
    return EnvPool(endpoints, **settings)


async def check_endpoints(
    pool: EnvPool,
    *,
    expect_env: str,
    allow_expert: bool,
    expect_options: dict[str, Any] | None = None,
) -> list[InfoReply]:
    """Refuse servers that do not match the configuration; return their /info.

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
                " on this machine). Nothing committed is lost: the same command continues",
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
    """Check the configured endpoints, if any, before a run begins.

    Errors: EnvError if one does not answer, ConfigError if one does not match the configuration.
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
