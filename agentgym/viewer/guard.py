"""Who may ask for pages, and what a browser may do with them.

Host and Origin are checked at every request, so that neither a name that leads here by accident nor
a page of somebody else gets in. Beyond loopback a token is asked for, too.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from http.cookies import SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "agentgym_view"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " object-src 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOW = "this server asks for a token; the address that `agentgym view` printed has it\n"


class Guard:
    """An ASGI app that passes on what may be asked, and marks every answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], port: int, token: str = "") -> None:
        """hosts: names under which this server is known; token: empty, none is asked for."""
        self._app, self._token = app, token
        names = [f"{host}:{port}" for host in hosts]
        self._hosts = frozenset(names + (list(hosts) if port == 80 else []))
        self._cookie = f"{COOKIE}_{port}"  # a cookie goes to every port of a host

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
        if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):
            return PlainTextResponse("a page of another origin has no business here\n", 403)
        if not _is_own(scope["method"], headers):
            return PlainTextResponse("a page of another site has no business here\n", 403)
        return self._unknown(scope, headers, hosts[0]) if self._token else None

    def _unknown(self, scope: Scope, headers: Headers, host: str) -> Response | None:
        """Answer to who has not shown the token; the address that has it gets a cookie."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if given and self._is_token(given[0]):
            answer = RedirectResponse(f"http://{host}{scope['path']}", 303)
            answer.set_cookie(self._cookie, self._token, 30 * 86_400, httponly=True, samesite="lax")
            return answer
        said = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        if self._is_token(said) or (cookie is not None and self._is_token(cookie.value)):
            return None
        return PlainTextResponse(_HOW, 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _is_own(method: str, headers: Headers) -> bool:
    """Whether a person or one of our pages asks; a link that a person follows is theirs."""
    site = headers.get("sec-fetch-site", "none")
    if site in ("none", "same-origin"):
        return True
    followed = (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    return method in ("GET", "HEAD") and followed
