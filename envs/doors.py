"""Admission of requests to an environment server: by Host, by Origin (programs, not web pages of
other sites) and by bearer token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.refusals import Refused
from envs.wire import TOKEN_VARIABLE, ErrorKind

# for probes and scrapers, which carry no token; the replies contain nothing of an episode
OPEN_PATHS = ("/healthz", "/readyz", "/metrics", "/health")
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)


class Doors:
    """Middleware that refuses a request before its body is read, and a WebSocket before it opens.

    A web page can make a browser send requests here, but it controls neither Host nor Origin.
    JSON needs a preflight, which this server never answers.
    DNS rebinding (a page's name resolves to this server's address) shows in the Host header.
    A page may open a WebSocket to any server: there only Origin, which a browser always sends,
    identifies it.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: Collection[str],
        refuse: Callable[[Refused], Response],
    ) -> None:
        """Wrap `app`. refuse: makes the response to a refused request.

        token: "" means no token is required.
        hosts: names in addition to localhost; a leading dot allows all subdomains.
        """
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._refuse = refuse

        self._is_served = lru_cache(maxsize=256)(
            lambda host, address: is_own(host.decode("latin-1"), address, hosts)
        )

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
        """Check Host, Origin, a body's content type and, if a token is required and the path is not
        in OPEN_PATHS, the token. Errors: Refused.
        """
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"")
        if not self._is_served(host, (scope.get("server") or ("",))[0]):
            message = (
                f"Host {_shown(host)} is no name of this server; use its address, or start it"
                " with --allow-host NAME"
            )
            raise Refused(ErrorKind.FORBIDDEN, message)
        origin = headers.get(b"origin")
        if origin is not None and origin.rpartition(b"://")[2] != host:
            message = f"Origin {_shown(origin)}: pages of other sites may not ask this server"
            raise Refused(ErrorKind.FORBIDDEN, message)
        bearer, is_closed = headers.get(b"authorization", b""), scope["path"] not in OPEN_PATHS
        if self._expected and is_closed and not hmac.compare_digest(bearer, self._expected):
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
    """Return True if a Host header names this server: localhost, `address`, or one of `names`.

    address: the local address of the connection. A pod's probes use it as Host, and so do clients
    that know only the address. names: a leading dot allows all subdomains.
    """
    match = HOST.fullmatch(host.lower())
    if match is None:
        return False
    name = (match[1] or match[2]).rstrip(".")
    ip = _address(name)
    if ip is not None and (ip.is_loopback or ip == _address(address)):
        return True
    return name in ("localhost", address) or any(
        name == known or (known[0] == "." and name.endswith(known)) for known in names
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _shown(value: bytes) -> str:
    return ascii(value[:100].decode("latin-1"))
