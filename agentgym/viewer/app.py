"""Routes and error pages of the viewer. No route uses a part of an address as a file's path."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from agentgym.config import ConfigError
from agentgym.pages import FOLDER, STATIC, Pages
from agentgym.records import RecordError
from agentgym.rollouts.env_client import EnvError
from agentgym.store.manifest import BlobMissing, DigestMismatch
from agentgym.viewer.bodies import Gone
from agentgym.viewer.bundle import Served, add_export
from agentgym.viewer.episode_page import add_episode
from agentgym.viewer.index import IndexDamaged
from agentgym.viewer.lists_page import add_lists
from agentgym.viewer.live import Room, add_play
from agentgym.viewer.query import BadQuery
from agentgym.viewer.replay import Missing
from agentgym.viewer.study_page import add_study
from agentgym.viewer.viewer import Viewer

THREADS = 8  # threads that render pages; each has its own connection to the index


def make_app(viewer: Viewer) -> FastAPI:
    """Return the application that serves a viewer's pages.
    Its startup limits its thread pool to THREADS; its shutdown ends the games being played.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        await room.close()

    app = FastAPI(
        title="agentgym view",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=HTMLResponse,
        lifespan=lifespan,
    )
    pages = Pages(Served(), is_live=True)
    pages.prepare()
    add_lists(app, viewer, pages)
    add_episode(app, viewer, pages)
    add_study(app, viewer, pages)
    add_export(app, viewer)
    room = Room(viewer.cfg, viewer.servers)
    add_play(app, viewer, pages, room)
    files = {name: (FOLDER / "static" / name).read_bytes() for name in STATIC}

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        headers = {"Cache-Control": "max-age=60"}
        return Response(files[name], media_type=STATIC[name], headers=headers)

    @app.get("/state")
    def state() -> JSONResponse:
        """Return the index's stamp, polled to see changes, and whether it is being built."""
        return JSONResponse({"stamp": viewer.index.stamp, "indexing": viewer.indexing is not None})

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    _add_errors(app, viewer, pages)
    return app


def _add_errors(app: FastAPI, viewer: Viewer, pages: Pages) -> None:
    """Add handlers that show known errors as pages.
    For an error of the index they also empty it, if this process writes it.
    """

    def answers(
        kind: type[Exception], status: int, title: str, hint: str = ""
    ) -> Callable[[Request, Exception], HTMLResponse]:
        def answer(_: Request, error: Exception) -> HTMLResponse:
            if isinstance(error, sqlite3.DatabaseError | IndexDamaged):
                viewer.damaged()
            # args[0] of an OSError is its errno; str() of a LookupError adds quotes
            message = str(error) if isinstance(error, OSError) else (*error.args, kind.__name__)[0]
            page = pages.render("message.html", title=title, said=message, hint=hint)
            return HTMLResponse(page, status)

        return answer

    rebuilt = "The index is derived from the store and is being built anew; load this page again."
    restore = "The store lists this as committed; `agentgym audit` looks at all of it."
    for kind, status, title, hint in (
        (BadQuery, 400, "That cannot be asked", ""),
        (Gone, 410, "This episode is not here", ""),
        (BlobMissing, 410, "This episode is not here", restore),
        (DigestMismatch, 500, "This episode is damaged", restore),
        (RecordError, 500, "This episode cannot be read", restore),
        (RecursionError, 500, "This is nested too deep to be shown", restore),
        (ConfigError, 400, "That cannot be done", ""),
        (Missing, 503, "This environment is not here", ""),
        (EnvError, 503, "The environment failed", ""),
        (OSError, 503, "The store cannot be read now", "Load this page again in a moment."),
        (IndexDamaged, 503, "The index is damaged", rebuilt),
        (sqlite3.DatabaseError, 503, "The index is damaged", rebuilt),
    ):
        app.add_exception_handler(kind, answers(kind, status, title, hint))

    def http(_: Request, error: Exception) -> HTMLResponse:
        assert isinstance(error, HTTPException)
        title, message = "That cannot be done", str(error.detail)
        if error.status_code == 404:
            title, message = "Not found", "there is no page at this address"
        page = pages.render("message.html", title=title, said=message, hint="")
        return HTMLResponse(page, error.status_code)

    app.add_exception_handler(HTTPException, http)
