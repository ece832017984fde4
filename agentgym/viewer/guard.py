"""Who may ask for pages, and what a browser may do with them.

Host and Origin are checked at every request, so that neither a name that leads here by accident nor
a page of somebody else gets in. The login is HTTP's own, which a browser keeps for this address and
port alone: a cookie would go to every port of the machine, other users' servers among them.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentgym.private import USER

LOGIN = "/login"  # where a link with the login in it leads: it goes on to / without it
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
    """An ASGI app that passes on what may be asked, and marks every answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], port: int, token: str = "") -> None:
        """hosts: names under which this server is known; token: the password of the login, or a
        bearer token; empty, none is asked for.
        """
        self._app, self._token = app, token
        login = base64.b64encode(f"{USER}:{token}".encode()).decode()
        self._known = (f"Basic {login}", f"Bearer {token}")
        names = [f"{host}:{port}" for host in hosts]
        self._hosts = frozenset(names + (list(hosts) if port == 80 else []))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no sockets here
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers)
        app: ASGIApp = self._app if answer is None else answer

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    own.setdefault(name, value)
            await send(message)

        await app(scope, receive, marked)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server is not known under that name\n", 403)
        if is_foreign(scope["method"], headers, f"http://{hosts[0]}"):
            return PlainTextResponse("a page of another origin has no business here\n", 403)
        if self._token and not self._is_known(headers):
            return PlainTextResponse(_HOW, 401, CHALLENGE)
        if scope["path"] == LOGIN:
            return after_login(hosts[0])
        return None

    def _is_known(self, headers: Headers) -> bool:
        given = headers.getlist("authorization")
        return len(given) == 1 and any(
            hmac.compare_digest(given[0].encode(), each.encode()) for each in self._known
        )


def after_login(host: str) -> Response:
    """With the host spelled out: after a relative address the page's own would hold the login, and
    no fetch works there.
    """
    return RedirectResponse(f"http://{host}/", 303)


def is_foreign(method: str, headers: Headers, own: str) -> bool:
    """Did a browser send this for a page that is not ours; a link that a person follows is
    theirs wherever it stood.
    """
    if any(origin != own for origin in headers.getlist("origin")):
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return not (
        method == "GET"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
