"""All four sites on one loopback port, in a thread of this process. The Host header selects the
site; the tenant header has the token of the session whose state the site shows.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sites.forum.pages import site as forum_site
from sites.hub import merges, pages, repository, tracker  # noqa: F401  (they add routes)
from sites.hub.site import site as hub_site
from sites.session_state import World, content
from sites.store import account  # noqa: F401  (adds routes)
from sites.store.admin import site as admin_site
from sites.store.shop import site as shop_site
from sites.web import Request, Site, parse_fields, plain

logger = logging.getLogger(__name__)

SITES = {
    "shopping": "shop.test",
    "shopping_admin": "admin.shop.test",
    "reddit": "forum.test",
    "gitlab": "code.test",
}
TENANT_HEADER = "x-tenant"
_BY_HOST: dict[str, Site] = {
    SITES[site.name]: site for site in (shop_site, admin_site, forum_site, hub_site)
}
_FOLDER = Path(__file__).resolve().parent / "templates" / "css"
_PALETTES = {
    "shop": "--accent:#1f5f57;--deep:#173f3a;--tint:#eef4f2;--page:#fff",
    "admin": "--accent:#a04a1d;--deep:#2e2a28;--tint:#f6efe9;--page:#faf8f6",
    "forum": "--accent:#7a3b63;--deep:#4d2540;--tint:#f7eff4;--page:#faf7f4",
    "hub": "--accent:#2a5b9b;--deep:#1c2a42;--tint:#eef3fa;--page:#fff",
}
_MAX_BODY = 256 * 1024
_START_S = _STOP_S = 10.0


class _Quiet(HttpToolsProtocol):
    """An HTTP protocol without an access log.

    It leaves uvicorn's loggers alone: they belong to the program around the sites.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False


class SiteServer:
    """An HTTP server of the sites with one seed's content; each tenant (session) has its own state.
    Call `start` and `stop` once each; open and close tenants from any thread.
    """

    def __init__(self, seed: int = 0) -> None:
        self._content = content(seed)
        self._tenants: dict[str, World] = {}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def start(self) -> int:
        """Serve on a free loopback port, in a thread, and return the port.
        Errors: RuntimeError if the server is not up within 10 s.
        """
        assert self._server is None, "a SiteServer starts once"
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=_Quiet,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="sites", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.stop()
                raise RuntimeError(
                    f"the embedded sites did not start within {_START_S:g} s; see the log"
                )
            time.sleep(0.01)
        port: int = self._socket.getsockname()[1]
        logger.info("embedded sites on 127.0.0.1:%d", port)
        return port

    def stop(self) -> None:
        """End the server and drop all tenants; also safe if it never started or has ended."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_STOP_S)
        if self._socket is not None:
            self._socket.close()
        self._tenants.clear()

    def open_tenant(self, login: bool = True) -> str:
        """Open a tenant and return its token. Its sites contain the seed's content; the demo
        users are logged in unless `login` is false.
        """
        token = secrets.token_urlsafe(24)
        self._tenants[token] = self._content.world(login)
        return token

    def close_tenant(self, token: str) -> None:
        self._tenants.pop(token, None)

    def state(self, token: str) -> World:
        """Return the tenant's state itself: only read it. Errors: KeyError for an unknown token."""
        return self._tenants[token]

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket: refused
            await send({"type": "websocket.close"})
            return
        body = await _body(receive)
        too_large = plain(413, "the form is too large")
        response = too_large if body is None else self._respond(scope, Headers(scope=scope), body)
        await response(scope, receive, send)

    def _respond(self, scope: Scope, headers: Mapping[str, str], body: bytes) -> Response:
        host = headers.get("host", "").partition(":")[0].lower()
        site = _BY_HOST.get(host)
        world = self._tenants.get(headers.get(TENANT_HEADER, ""))
        if site is None:
            return plain(404, "no such site")
        if world is None:
            return plain(403, "no such session")
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in ("GET", "POST"):
            return plain(405, f"{method} is not possible here")
        if path in ("/static/site.css", "/favicon.ico"):
            return _css(site.folder) if path.endswith(".css") else Response(status_code=204)
        try:
            query, _ = parse_fields(scope["query_string"].decode("latin-1"))
            text = body.decode("utf-8", "replace") if method == "POST" else ""
            form, repeated = parse_fields(text)
        except ValueError:
            return plain(400, "too many fields")
        referer = headers.get("referer", "")
        return site.answer(Request(world, site, method, host, path, query, form, referer, repeated))


async def _body(receive: Receive) -> bytes | None:
    """Read the request's body, incomplete if the client disconnects; None if it is too large."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > _MAX_BODY:
            return None
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return body


@cache
def _css(folder: str) -> Response:
    """Return the response with the stylesheet of the site whose templates are in `folder`; cached.

    It is made of a palette, a common part, the site's own rules and its pictures.
    """
    files = (_FOLDER / f"{name}.css" for name in ("base", folder))
    parts = [f":root{{{_PALETTES[folder]}}}", *(file.read_text(encoding="utf-8") for file in files)]
    if folder == "shop":
        icons = json.loads((_FOLDER / "icons.json").read_text(encoding="utf-8"))
        parts += [_picture(name, path) for name, path in icons.items()]
        parts += [f".s{n}{{width:{n * 10}%}}" for n in range(11)]
    cached = {"cache-control": "max-age=3600"}
    return Response("\n".join(parts), headers=cached, media_type="text/css")


def _picture(name: str, path: str) -> str:
    """Return the CSS rule of the icon `name`, a 24 x 24 line drawing. path: SVG path data."""
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24' fill='none' stroke='#fff'"
        " stroke-width='1.4' stroke-linecap='round' stroke-linejoin='round'><path"
        f" d='{path}'/></svg>"
    )
    return f'.i-{name}{{background-image:url("data:image/svg+xml,{quote(svg, safe="/:=")}")}}'
