"""Gate before the Prefect server, MLflow and the viewer: it admits only this project's owner.

A browser keeps the HTTP login for this address and port alone; a cookie would go to every port of
the machine, including other users' servers.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentgym.deploy.owned import end_with_owner
from agentgym.viewer.guard import CHALLENGE, LOGIN, after_login, has_login, is_foreign

if TYPE_CHECKING:
    import uvicorn

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_FRAMED = (b"x-frame-options", b"SAMEORIGIN")
_HOW = (
    "this server belongs to one user of this machine; the link that `make up` or `make ui` prints"
    " logs in\n"
)


class Gate:
    """ASGI app that forwards its owner's requests to `app` and refuses all others.

    login: `user:password`. open_paths: paths that anyone may GET, because they show no more than
    that a server is there. sockets: True if there are WebSockets, which then authenticate by their
    first message, as Prefect's do. entered: host -> the response to a login.
    """

    def __init__(
        self,
        app: ASGIApp,
        login: str,
        *,
        open_paths: Collection[str],
        sockets: bool,
        entered: Callable[[str], Response] = after_login,
    ) -> None:
        self._app, self._open, self._sockets = app, frozenset(open_paths), sockets
        self._entered = entered
        self._login, self._wanted = login, b"Basic " + base64.b64encode(login.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None:
            is_known = scope["type"] == "websocket" and has_login(headers, self._wanted)
            receive = self._with_token(receive) if is_known else receive
            await self._app(scope, receive, _unframed(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # not accepted yet: a 403
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.getlist("host")
        if len(host) != 1 or not _LOOPBACK.fullmatch(host[0]):
            return PlainTextResponse("this server is known by its loopback address alone\n", 403)
        if scope["type"] == "websocket":
            # our pages open none, so a request with an origin comes from another site
            return PlainTextResponse("", 403) if "origin" in headers or not self._sockets else None
        if is_foreign(scope["method"], headers, f"http://{host[0]}"):
            return PlainTextResponse("a page of another origin has no business here\n", 403)
        if scope["method"] == "GET" and scope["path"] in self._open:
            return None
        if not has_login(headers, self._wanted):
            return PlainTextResponse(_HOW, 401, CHALLENGE)
        if scope["path"] == LOGIN:
            return self._entered(host[0])
        return None

    def _with_token(self, receive: Receive) -> Receive:
        """Return a `receive` that replaces the first WebSocket message by one with our login."""
        is_first = True

        async def completed() -> Message:
            nonlocal is_first
            message = await receive()
            if message["type"] == "websocket.receive" and is_first:
                is_first = False
                message = {**message, "text": json.dumps({"type": "auth", "token": self._login})}
            return message

        return completed


def _unframed(send: Send) -> Send:
    """Return a `send` that forbids other sites to frame our pages, which could mislead clicks."""

    async def framed(message: Message) -> None:
        if message["type"] == "http.response.start":
            # whatever its case: an application may not write names in lower case
            others = [pair for pair in message.get("headers", ()) if pair[0].lower() != _FRAMED[0]]
            message = {**message, "headers": [*others, _FRAMED]}
        await send(message)

    return framed


def listener(port: int) -> socket.socket:
    """Return a socket that listens on a loopback port; 0 means any free one. Errors: OSError."""
    # it listens at once: until then another socket with SO_REUSEADDR may bind here and listen first
    return socket.create_server(("127.0.0.1", port))


def serve(app: ASGIApp, bound: socket.socket, *, owned: bool = True) -> None:
    """Serve `app` on a bound socket until SIGTERM or, if owned, until the owner is gone."""
    import uvicorn  # not needed by the supervisor and the commands

    if owned:
        end_with_owner()
    uvicorn.Server(listening(app)).run(sockets=[bound])


def listening(app: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's settings for `app`, with request bodies of any size.
    Also raise this process's limit of open files.
    """
    from envs.connection import bounded

    return bounded(app, any_body=True, lifespan="on", server_header=False)
