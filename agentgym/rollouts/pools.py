"""Sessions on the environment servers of a run, in any protocol: address lookup, load balancing,
and the check of servers against the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from agentgym.config import ConfigError, EnvConfig
from agentgym.deploy.fleets.addresses import listed
from agentgym.rollouts.env_client import (
    EnvClient,
    EnvError,
    EnvSession,
    Retryable,
    back_off,
    give_up,
)
from agentgym.rollouts.episode import Guide
from agentgym.types import Endpoint, Endpoints, Item
from envs.wire import PROTOCOL_VERSION, CreateReply, CreateRequest, InfoReply, ReadyReply

logger = logging.getLogger(__name__)

LOAD_AGE_S = 1.0  # maximum age of a server's reported load
RESOLVE_S = 30.0  # maximum age of a host name's addresses
LISTED_S = 1.0  # maximum age of a listing's addresses
FLEET_PATIENCE_S = 180.0  # a lost pod is recreated elsewhere within this time
CHECK_TIMEOUT_S = 10.0  # of one request before a run begins
# fields of /info in which a server that comes later must equal the others
ALIKE = ("env", "options", "protocol_version", "offers_expert", "instructions", "examples")


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
        is looked up repeatedly. If an endpoint has a listing file, the servers are those in it.
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
        self.client.is_gone = self._is_gone
        self._configured = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self.endpoints = self._configured  # URLs of the servers as last looked up
        self._listings = {
            endpoint.rstrip("/"): endpoint.listing
            for endpoint in endpoints
            if isinstance(endpoint, Endpoint) and endpoint.listing
        }
        self._looked_up_at: dict[str, float] = {}
        self._resolved_at = -RESOLVE_S
        self._random = random.SystemRandom()  # unseeded: the choice of server changes no result
        # open sessions of each server, adjusted by ours; inf if the server accepts none
        self._load: defaultdict[str, float] = defaultdict(float)
        self._load_seen_at: defaultdict[str, float] = defaultdict(float)
        self._patience_s = patience_s
        self._refused_since: float | None = None  # when the pool last stopped opening sessions

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__()

    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide:
        """Check that the servers match the configuration; return their instructions and examples.
        A server that appears later must match these. Errors: those of `check_endpoints`.
        """
        await self._resolve()
        replies = await check_endpoints(
            self, expect_env=env.name, allow_expert=allow_expert, expect_options=env.options
        )
        self.client.known = dict(zip(self.endpoints, replies, strict=True))
        return Guide(replies[0].instructions, replies[0].examples)

    async def info(self) -> list[InfoReply]:
        """Return each endpoint's /info, in the order of `endpoints`. Errors: EnvError."""
        asking = (self.client.ask(endpoint, "/info", InfoReply) for endpoint in self.endpoints)
        return list(await asyncio.gather(*asking))

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> AsyncIterator[EnvSession]:
        """Yield an open session on the item; close it after the block.
        request_key: a server opens one session for all requests with one key, so use it only once.
        Errors: EnvError.
        """
        endpoint, reply = await self._create(
            CreateRequest(request_key=request_key, task_id=item.task_id)
        )
        self._load[endpoint] += 1
        session = EnvSession(self.client, endpoint, reply)
        try:
            yield session
        finally:
            self._load[endpoint] -= 1
            await session.close()

    async def _create(self, request: CreateRequest) -> tuple[str, CreateReply]:
        """Open a session on some server; return (endpoint, reply).
        If the server is full, draining or unreachable, wait and try again, perhaps on another one.
        A lost reply may leave an unused session on a server, which its reaper ends.
        Errors: EnvError; after such a failure only once all retries and the patience are used up.
        """
        attempt = 0
        while True:
            endpoint = await self._choose()
            try:
                reply = await self.client.send(endpoint, "/create", CreateReply, request)
                self._refused_since = None
                return endpoint, reply
            except Retryable as error:
                now = time.monotonic()
                # no session there until its load is refreshed, after LOAD_AGE_S
                self._load[endpoint], self._load_seen_at[endpoint] = float("inf"), now
                self._refused_since = self._refused_since or now
                is_patient = now - self._refused_since < self._patience_s
                if attempt >= self.client.max_retries and not is_patient:
                    give_up(endpoint, "/create", "", attempt, error)
                await back_off(attempt, error, nowhere_else=len(self.endpoints) == 1)
                attempt += 1

    async def _choose(self) -> str:
        """Return the less loaded of two servers drawn at random.
        Errors: EnvError if it appeared after `check` and differs from the others, or does not
        answer; those of `_resolve`.
        """
        await self._resolve()
        pair = self._random.sample(self.endpoints, min(2, len(self.endpoints)))
        if len(pair) > 1:
            await asyncio.gather(*(self._refresh_load(endpoint) for endpoint in pair))
        chosen = min(pair, key=self._load.__getitem__)
        if self.client.known and chosen not in self.client.known:
            await self._check_newcomer(chosen)
        return chosen

    async def _resolve(self) -> None:
        """Update `endpoints`: read listings at most once in LISTED_S, look up host names at most
        once in RESOLVE_S. An endpoint that cannot be resolved keeps its addresses.
        Errors: EnvError if a listing reports that its servers may not be used any more.
        """
        age_s = LISTED_S if self._listings else RESOLVE_S
        if time.monotonic() - self._resolved_at < age_s:
            return
        self._resolved_at = time.monotonic()
        resolved: dict[str, str] = {}  # endpoint -> host name that resolved to it, if another
        for endpoint in self._configured:
            addresses = self._listed(endpoint)
            resolved |= await self._looked_up(endpoint) if addresses is None else addresses
        self.client.hosts = {endpoint: name for endpoint, name in resolved.items() if name}
        if set(resolved) != set(self.endpoints):
            logger.info("environment servers are now %s", ", ".join(resolved))
        self.endpoints = tuple(resolved)

    def _listed(self, endpoint: str) -> dict[str, str] | None:
        """Return URL -> host name for the servers in the endpoint's listing, those known so far if
        it is empty; None if the endpoint has no listing that can be read.
        Errors: EnvError with the trouble that the listing reports.
        """
        path = self._listings.get(endpoint)
        if path is None or (listing := listed(path)) is None:
            return None
        addresses, trouble = listing
        if trouble:
            raise EnvError(endpoint, "", "", "fleet", trouble)
        name = urlsplit(endpoint).netloc
        return dict.fromkeys(addresses, name) or self._known(endpoint)

    def _is_gone(self, endpoint: str) -> bool:
        """Return True if there are listings, all name servers, and none names this endpoint."""
        listings = [listed(path) for path in self._listings.values()]
        return bool(listings) and all(
            listing and listing[0] and endpoint not in listing[0] for listing in listings
        )

    async def _looked_up(self, endpoint: str) -> dict[str, str]:
        """Return URL -> host name for the addresses of the endpoint's host; the known ones if the
        lookup is recent or fails; {endpoint: ""} if the host has one address, or is not looked up
        because it is an address or localhost, or the URL is not http.
        """
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname or _is_address(parts.hostname):
            return {endpoint: ""}
        if time.monotonic() - self._looked_up_at.get(endpoint, -RESOLVE_S) < RESOLVE_S:
            return self._known(endpoint)
        self._looked_up_at[endpoint] = time.monotonic()
        addresses: set[tuple[str, int]] = set()
        with contextlib.suppress(OSError):
            rows = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
            )
            addresses = {
                (f"[{row[4][0]}]" if row[0] is socket.AF_INET6 else str(row[4][0]), int(row[4][1]))
                for row in rows
            }
        if not addresses:
            logger.warning(
                "%s cannot be found; going on with the addresses known so far", parts.hostname
            )
            return self._known(endpoint)
        if len(addresses) < 2:
            return {endpoint: ""}
        urls = [f"http://{host}:{port}{parts.path}" for host, port in sorted(addresses)]
        return dict.fromkeys(urls, parts.netloc)

    def _known(self, endpoint: str) -> dict[str, str]:
        """Return URL -> host name as last looked up for the endpoint; {endpoint: ""} if never."""
        name = urlsplit(endpoint).netloc
        known = {url: host for url, host in self.client.hosts.items() if host == name}
        return known or {endpoint: ""}

    async def _check_newcomer(self, endpoint: str) -> None:
        expected = next(iter(self.client.known.values()))
        info = await self.client.ask(endpoint, "/info", InfoReply)
        for name in ALIKE:
            if getattr(info, name) != getattr(expected, name):
                message = (
                    f"a server that came later has {name}={getattr(info, name)!r:.200}, the others"
                    f" {getattr(expected, name)!r:.200}"
                )
                raise EnvError(endpoint, "/info", "", "mismatch", f"{message}; make them equal")
        self.client.known[endpoint] = info

    async def _refresh_load(self, endpoint: str) -> None:
        """Ask a server for its number of open sessions, at most once in LOAD_AGE_S; in between, the
        pool counts its own. Without an answer the load is infinite; the failure is only logged.
        """
        now = time.monotonic()
        if now - self._load_seen_at[endpoint] < LOAD_AGE_S:
            return
        self._load_seen_at[endpoint] = now
        try:
            ready = await self.client.send(endpoint, "/readyz", ReadyReply)
            self._load[endpoint] = float(ready.active_sessions)
        except (Retryable, EnvError) as error:
            if self._load[endpoint] != float("inf"):
                logger.warning("%s takes no sessions: %s", endpoint, error)
            self._load[endpoint] = float("inf")


def _is_address(host: str) -> bool:
    """Return True for a host that needs no lookup: an IP address or localhost."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


class AnyPool(AbstractAsyncContextManager[Any], Protocol):
    """Interface of the pools of one environment's servers, for any `env.dialect`."""

    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]: ...
    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide: ...


class EnvPools:
    """The servers of every environment of a run. Use as `async with`."""

    def __init__(self, pools: Mapping[str, AnyPool]) -> None:
        """Prepare the pools. pools: by environment; `async with` opens and closes them."""
        self._pools = pools
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for pool in self._pools.values():
            await self._stack.enter_async_context(pool)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @classmethod
    def of(cls, envs: Sequence[EnvConfig], endpoints: Endpoints) -> Self:
        """Make the pool of each environment. endpoints: by environment. If they are not those of
        the configuration, they are our own servers and speak our protocol, not `env.dialect`.
        """
        return cls({env.name: _pool(env, endpoints[env.name]) for env in envs})

    def session(self, item: Item, request_key: str) -> AbstractAsyncContextManager[Any]:
        """Return a context with a session of the item's environment, see `EnvPool.session`."""
        return self._pools[item.env].session(item, request_key)

    async def check(self, envs: Sequence[EnvConfig], *, allow_expert: bool) -> dict[str, Guide]:
        """Check that all servers match the configuration; return environment -> its guide.
        Errors: EnvError; ValueError naming the endpoint.
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
    """Check that all servers match the configuration and each other; return their /info, in order.
    expect_env: name of the environment that they must serve.
    allow_expert: accept servers that offer their expert.
    expect_options: the configured options; each must be served with this value.
    Errors: EnvError if a server does not answer; ValueError naming the endpoint with a mismatch.
    """
    try:
        replies = await pool.info()
    except EnvError as error:
        if error.kind != "unreachable":
            raise
        message = (
            f"{error.message}; expected a {expect_env} server there: start it (python -m envs"
            f" serve {expect_env} --port PORT), or correct env.endpoints (empty: one is started"
            " on this machine). Nothing committed is lost: the same command continues"
        )
        raise EnvError(error.endpoint, error.route, "", error.kind, message) from error
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
    """Check the configured endpoints, if any, before a run begins. Errors: EnvError if one does not
    answer; ConfigError if one does not match the configuration or offers its expert.
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
