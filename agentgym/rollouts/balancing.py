"""Which server of an environment gets the next session: those a name stands for, and their load."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import urlsplit

from agentgym.deploy.fleets.addresses import listed
from agentgym.rollouts.client import EnvClient, EnvError, Retryable
from agentgym.types import Endpoint
from envs.wire import InfoReply, ReadyReply

logger = logging.getLogger(__name__)

LOAD_AGE_S = 1.0  # how old a server's reported load may be
RESOLVE_S = 30.0  # how long the addresses of a host name are believed
LISTED_S = 1.0  # and those of a listing


class Balancer:
    """Servers of one environment, which may come and go."""

    def __init__(self, endpoints: Sequence[str], client: EnvClient) -> None:
        """endpoints: URLs; a host name with several addresses stands for a server at each, and is
        looked up again and again; where one has a listing, that says which servers those are.
        """
        self._configured = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self._listings = {
            each.rstrip("/"): each.listing
            for each in endpoints
            if isinstance(each, Endpoint) and each.listing
        }
        self._looked_up_at: dict[str, float] = {}
        client.is_gone = self._is_gone
        self.endpoints = self._configured  # as last looked up
        self._client = client
        self._resolved_at = -RESOLVE_S
        self._random = random.SystemRandom()  # which server answers changes no result
        # open sessions, ours counted by whoever opens them; inf where the server takes none
        self.load: defaultdict[str, float] = defaultdict(float)
        self._load_seen_at: defaultdict[str, float] = defaultdict(float)

    def avoid(self, endpoint: str) -> None:
        """It opens no session at the moment."""
        self.load[endpoint], self._load_seen_at[endpoint] = float("inf"), time.monotonic()

    async def choose(self) -> str:
        """The less loaded of two servers drawn at random.
        Errors: EnvError where it has come since the check and is another one.
        """
        await self.resolve()
        pair = self._random.sample(self.endpoints, min(2, len(self.endpoints)))
        if len(pair) > 1:
            await asyncio.gather(*(self._refresh_load(endpoint) for endpoint in pair))
        chosen = min(pair, key=self.load.__getitem__)
        if self._client.known and chosen not in self._client.known:
            await self._check_newcomer(chosen)
        return chosen

    async def resolve(self) -> None:
        """Look up where servers are: those of a listing again and again, host names at most once
        in RESOLVE_S. What cannot be found keeps the addresses it had.

        Errors: EnvError where a listing says that nobody shall play there any more.
        """
        age_s = LISTED_S if self._listings else RESOLVE_S
        if time.monotonic() - self._resolved_at < age_s:
            return
        self._resolved_at = time.monotonic()
        found: dict[str, str] = {}  # endpoint -> name it was found under, where that is another
        for endpoint in self._configured:
            told = self._listed(endpoint)
            found |= await self._looked_up(endpoint) if told is None else told
        self._client.hosts = {endpoint: name for endpoint, name in found.items() if name}
        if set(found) != set(self.endpoints):
            logger.info("environment servers are now %s", ", ".join(found))
        self.endpoints = tuple(found)

    def _listed(self, endpoint: str) -> dict[str, str] | None:
        """As a listing of this machine says; None where there is none."""
        if (told := listed(self._listings.get(endpoint, ""))) is None:
            return None
        addresses, trouble = told
        if trouble:
            raise EnvError(endpoint, "", "", "fleet", trouble)
        name = urlsplit(endpoint).netloc
        return dict.fromkeys(addresses, name) or self._known(endpoint)

    def _is_gone(self, endpoint: str) -> bool:
        """Whether listings name other servers and no longer this one: it is lost, or drains."""
        told = [listed(path) for path in self._listings.values()]
        return bool(told) and all(each and each[0] and endpoint not in each[0] for each in told)

    async def _looked_up(self, endpoint: str) -> dict[str, str]:
        """Each address of a host name; the endpoint itself where it has but one."""
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
        return {
            f"http://{host}:{port}{parts.path}": parts.netloc for host, port in sorted(addresses)
        }

    def _known(self, endpoint: str) -> dict[str, str]:
        """As it was last looked up."""
        name = urlsplit(endpoint).netloc
        return {known: told for known, told in self._client.hosts.items() if told == name} or {
            endpoint: ""
        }

    async def _check_newcomer(self, endpoint: str) -> None:
        expected, info = (
            next(iter(self._client.known.values())),
            await self._client.ask(endpoint, "/info", InfoReply),
        )
        for name in (
            "env",
            "options",
            "protocol_version",
            "offers_expert",
            "instructions",
            "examples",
        ):
            if getattr(info, name) != getattr(expected, name):
                message = (
                    f"a server that came later has {name}={getattr(info, name)!r:.200}, the others"
                    f" {getattr(expected, name)!r:.200}"
                )
                raise EnvError(endpoint, "/info", "", "mismatch", f"{message}; make them equal")
        self._client.known[endpoint] = info

    async def _refresh_load(self, endpoint: str) -> None:
        """Ask at most once in LOAD_AGE_S; in between our own sessions are counted on top."""
        now = time.monotonic()
        if now - self._load_seen_at[endpoint] < LOAD_AGE_S:
            return
        self._load_seen_at[endpoint] = now
        try:
            ready = await self._client.send(endpoint, "/readyz", ReadyReply)
            self.load[endpoint] = float(ready.active_sessions)
        except (Retryable, EnvError) as error:
            if self.load[endpoint] != float("inf"):
                logger.warning("%s takes no sessions: %s", endpoint, error)
            self.load[endpoint] = float("inf")


def _is_address(host: str) -> bool:
    """True for what need not be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
