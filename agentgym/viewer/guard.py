"""Access control of the viewer, and the security headers of its pages.

Host and Origin are checked on every request, against DNS rebinding and requests from other
sites. The login is HTTP Basic, which a browser keeps for this host and port alone; a cookie
would be sent to every port of the machine, also to other users' servers.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentgym.private import USER

LOGIN = "/login"  # target of a link that contains the login; redirects to / without it
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " object-src 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOW = "this server belongs to one user; the link that `agentgym view` printed logs in\n"
CHALLENGE = {"WWW-Authenticate": 'Basic realm="agentgym", charset="UTF-8"'}


class Guard:
    """ASGI app that rejects requests of a wrong host, origin or login and adds security headers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], port: int, token: str = "") -> None:
        """Guard `app` on a port.

        hosts: names by which browsers reach this server.
        token: password of the login, also accepted as a bearer token; empty: no login.
        """
        self._app, self._token = app, token
        login = base64.b64encode(f"{USER}:{token}".encode()).decode()
        self._known = (f"Basic {login}".encode(), f"Bearer {token}".encode())
        names = [f"{host}:{port}" for host in hosts]
        self._hosts = frozenset(names + (list(hosts) if port == 80 else []))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no websocket routes
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers)
        app: ASGIApp = self._app if answer is None else answer

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    response_headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, marked)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server is not known under that name\n", 403)
        if is_foreign(scope["method"], headers, f"http://{hosts[0]}"):
            return PlainTextResponse("a page of another origin has no business here\n", 403)
        if self._token and not has_login(headers, *self._known):
            return PlainTextResponse(_HOW, 401, CHALLENGE)
        if scope["path"] == LOGIN:
            return after_login(hosts[0])
        return None


def has_login(headers: Headers, *known: bytes) -> bool:
    """Return True if the one Authorization header has one of these values, in constant time."""
    given = [credentials.encode() for credentials in headers.getlist("authorization")]
    return len(given) == 1 and any(hmac.compare_digest(given[0], login) for login in known)


def after_login(host: str) -> Response:
    """Return a redirect to http://HOST/ without a login, as fetch() rejects URLs that have one."""
    return RedirectResponse(f"http://{host}/", 303)


def is_foreign(method: str, headers: Headers, our_origin: str) -> bool:
    """Return True for a request that a browser sent on behalf of another site's page.

    A link that a person follows is not foreign, whichever page it is on.
    our_origin: this server's, as in the Origin header, `http://HOST:PORT`.
    """
    if any(origin != our_origin for origin in headers.getlist("origin")):
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return not (
        method == "GET"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
