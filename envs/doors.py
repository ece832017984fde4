"""Which requests an environment server looks at: those meant for it, of programs and not of
pages, that bear its token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.sessions import Refused
from envs.wire import TOKEN_VARIABLE, ErrorKind

# asked by probes and scrapers, which bear no token; nothing of an episode is in them
OPEN_PATHS = ("/healthz", "/readyz", "/metrics", "/health")
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)


class Doors:
    """Refuses a request before its body is read, and a WebSocket before it is opened.

    A browser sends what any page asks it to, but the page chooses neither Host nor Origin, and
    without a preflight, which nobody answers here, it cannot send JSON. A page whose name was made
    to mean this server's address is told by its Host.
    A page may open a WebSocket anywhere: there its Origin, which a browser always sends, is all
    that tells.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: Collection[str],
        refuse: Callable[[Refused], Response],
    ) -> None:
        """token: "" asks for none; hosts: names beside localhost, one that begins with a dot
        means all below it.
        """
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._refuse = refuse

        @lru_cache(maxsize=256)
        def is_served(host: bytes, address: str) -> bool:
            return is_own(host.decode("latin-1"), address, hosts)

        self._is_served = is_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            try:
                self._check(scope)
            except Refused as error:
                response = self._refuse(error)
                response.headers["Connection"] = "close"
                if error.reply.kind is ErrorKind.UNAUTHORIZED:
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Errors: Refused."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"")
        if not self._is_served(host, (scope.get("server") or ("",))[0]):
            message = (
                f"Host {_shown(host)} is no name of this server; ask by its address, or start it"
                " with --allow-host NAME"
            )
            raise Refused(ErrorKind.FORBIDDEN, message)
        origin = headers.get(b"origin")
        if origin is not None and origin.rpartition(b"://")[2] != host:
            raise Refused(
                ErrorKind.FORBIDDEN,
                f"Origin {_shown(origin)}: pages of other sites may not ask this server",
            )
        bearer = headers.get(b"authorization", b"")
        if (
            self._expected
            and scope["path"] not in OPEN_PATHS
            and not hmac.compare_digest(bearer, self._expected)
        ):
            message = (
                f"this server asks for a bearer token; set {TOKEN_VARIABLE} to the one it was"
                " started with"
            )
            raise Refused(ErrorKind.UNAUTHORIZED, message)
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            kind = headers.get(b"content-type", b"")
            if kind.partition(b";")[0].strip().lower() != b"application/json":
                message = f"Content-Type {_shown(kind)}: a body must be application/json"
                raise Refused(ErrorKind.BAD_REQUEST, message, status=415)


def is_own(host: str, address: str, names: Collection[str]) -> bool:
    """Whether a Host header names this server.

    address: the one the connection came in at.
    A pod's probes ask by it, as does whoever has only an address.
    """
    match = HOST.fullmatch(host.lower())
    if match is None:
        return False
    name = (match[1] or match[2]).rstrip(".")
    asked = _address(name)
    if asked is not None and (asked.is_loopback or asked == _address(address)):
        return True
    return name in ("localhost", address) or any(
        name == own or (own[0] == "." and name.endswith(own)) for own in names
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _shown(value: bytes) -> str:
    return ascii(value[:100].decode("latin-1"))
