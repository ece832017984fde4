"""Choice of the server that gets the next session: address lookup and load balancing."""

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
from agentgym.rollouts.env_client import EnvClient, EnvError, Retryable
from agentgym.types import Endpoint
from envs.wire import InfoReply, ReadyReply

logger = logging.getLogger(__name__)

LOAD_AGE_S = 1.0  # maximum age of a server's reported load
RESOLVE_S = 30.0  # maximum age of a host name's addresses
LISTED_S = 1.0  # maximum age of a listing's addresses


class Balancer:
    """Choice among the servers of one environment, which may come and go."""

    def __init__(self, endpoints: Sequence[str], client: EnvClient) -> None:
        """Prepare the choice and set `client.is_gone`; nothing is looked up yet.

        endpoints: URLs. A host name with several addresses stands for a server at each address and
        is looked up repeatedly. If an endpoint has a listing, its servers are read from the
        listing.
        """
        self._configured = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self._listings = {
            endpoint.rstrip("/"): endpoint.listing
            for endpoint in endpoints
            if isinstance(endpoint, Endpoint) and endpoint.listing
        }
        self._looked_up_at: dict[str, float] = {}
        client.is_gone = self._is_gone
        self.endpoints = self._configured  # as last looked up
        self._client = client
        self._resolved_at = -RESOLVE_S
        self._random = random.SystemRandom()  # unseeded: the choice of server changes no result
        # open sessions, adjusted by the pool that opens ours; inf if the server accepts none
        self.load: defaultdict[str, float] = defaultdict(float)
        self._load_seen_at: defaultdict[str, float] = defaultdict(float)

    def avoid(self, endpoint: str) -> None:
        """Mark a server as opening no session until its load is refreshed, after LOAD_AGE_S."""
        self.load[endpoint], self._load_seen_at[endpoint] = float("inf"), time.monotonic()

    async def choose(self) -> str:
        """Return the less loaded of two servers drawn at random.
        Errors: EnvError if the server came after the others were checked and differs.
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
        """Look up the servers: listings every LISTED_S, host names at most once in RESOLVE_S.
        An endpoint that cannot be resolved keeps its addresses.

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
        self._client.hosts = {endpoint: name for endpoint, name in resolved.items() if name}
        if set(resolved) != set(self.endpoints):
            logger.info("environment servers are now %s", ", ".join(resolved))
        self.endpoints = tuple(resolved)

    def _listed(self, endpoint: str) -> dict[str, str] | None:
        """Return address -> host name from the endpoint's listing; None if none is on this machine.
        Errors: EnvError with the trouble that the listing reports.
        """
        if (listing := listed(self._listings.get(endpoint, ""))) is None:
            return None
        addresses, trouble = listing
        if trouble:
            raise EnvError(endpoint, "", "", "fleet", trouble)
        name = urlsplit(endpoint).netloc
        return dict.fromkeys(addresses, name) or self._known(endpoint)

    def _is_gone(self, endpoint: str) -> bool:
        """Return True if all listings name servers but not this one: it is lost, or drains."""
        listings = [listed(path) for path in self._listings.values()]
        return bool(listings) and all(
            listing and listing[0] and endpoint not in listing[0] for listing in listings
        )

    async def _looked_up(self, endpoint: str) -> dict[str, str]:
        """Return URL -> host name for the addresses of the endpoint's host; the known ones if the
        lookup is recent or fails; {endpoint: ""} if it needs no lookup or has one address.
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
        return {
            f"http://{host}:{port}{parts.path}": parts.netloc for host, port in sorted(addresses)
        }

    def _known(self, endpoint: str) -> dict[str, str]:
        """Return URL -> host name of the endpoint as last looked up; without any, the endpoint."""
        name = urlsplit(endpoint).netloc
        return {known: host for known, host in self._client.hosts.items() if host == name} or {
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
        """Ask for the load at most once in LOAD_AGE_S; the pool adds our own sessions meanwhile.
        Without an answer the load is infinite.
        """
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
    """Return True for a host that needs no lookup."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
