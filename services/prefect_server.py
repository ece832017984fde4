"""A Prefect server for the duration of one command. It watches a pipe and ends with its owner; if
it dies, it is restarted on its port with its database, before Prefect's client stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_SERVER_API_AUTH_STRING,
    temporary_settings,
)
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentgym.private import STATE, new_login, own_login
from services.proxy import Gate, listener, serve
from services.state import is_stale, locked, running
from services.supervisor import CHECK_S, Service, server_environment, wait_until_healthy

COMMAND = (sys.executable, "-m", "services.prefect_server")  # then a socket's descriptor
DRAIN_TIMEOUT_S = 10.0


@contextlib.contextmanager
def prefect_api(state_dir: Path) -> Iterator[str]:
    """Yield the address of the API that Prefect's client uses during the block.
    The server is the configured one if PREFECT_API_URL names one, that of `make up` while it runs,
    else a new one on a free loopback port, whose login only this process and its children know.

    Errors: RuntimeError with the end of the new server's log, which is in `logs` of state_dir.
    """
    # prefect.toml may name the server of a `make up` that was killed since
    is_old = "PREFECT_API_URL" not in os.environ and is_stale(STATE)
    configured = None if is_old else PREFECT_API_URL.value()
    if configured:
        # only this project's own server gets its login
        login, services = own_login(configured), running(STATE)
        if login is None or services is None:
            yield configured
            return
        own = {PREFECT_API_URL: services.api, PREFECT_API_AUTH_STRING: login}
        with temporary_settings(own):
            yield services.api
        return
    log_path = state_dir / "logs" / "prefect-server.log"
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(listener(0))
        address, login = f"http://127.0.0.1:{bound.getsockname()[1]}", new_login()
        environment = {**server_environment(address, login), "PREFECT_UI_ENABLED": "0"}
        # one starts at a time: two would create the tables of their shared database at once
        with locked(state_dir / "logs" / "prefect-server.lock"):
            command = [*COMMAND, str(bound.fileno())]
            service = Service("the Prefect server", command, log_path, environment, bound)
            stack.callback(service.close)
            service.keep()
            api = f"{address}/api"
            wait_until_healthy(service, f"{api}/health")
        stack.enter_context(_kept(service))
        client = {PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: login}
        stack.enter_context(temporary_settings(client))
        try:
            yield api
        finally:
            # at exit, queued messages would otherwise retry the ended server for a minute
            APILogWorker.drain_all(timeout=DRAIN_TIMEOUT_S)
            EventsWorker.drain_all(timeout=DRAIN_TIMEOUT_S)


@contextlib.contextmanager
def _kept(service: Service) -> Iterator[None]:
    """Restart the service when it dies during the block, until `Service.keep` gives it up.
    The service still runs after the block.
    """
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(CHECK_S):
            service.keep()

    thread = threading.Thread(target=watch, name="prefect-server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def adapt_to_sqlite() -> None:
    """Mend two faults of the server with SQLite as its database.

    A transaction that may write takes the lock when it begins: one that begins with a read fails
    (`database is locked`) if another has written in between, and an event is then lost to the
    automations, which bring crashed runs back.

    A changed automation is loaded in a task of the server's event loop. Prefect loads it on another
    thread while the loop stands still: it waits for ever if a task of the loop holds what it needs,
    the lock of the loaded automations or SQLite's (Prefect's issue 23055).
    """
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.events.models import automations

    begin = AioSqliteConfiguration.begin_transaction
    loading: set[asyncio.Task[None]] = set()  # the loop alone would not keep them alive

    def begin_immediately(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> contextlib.AbstractAsyncContextManager[AsyncSessionTransaction]:
        return begin(self, session, with_for_update=True)

    def later(change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        loading.add(task)
        task.add_done_callback(loading.discard)

    setattr(AioSqliteConfiguration, "begin_transaction", begin_immediately)  # noqa: B010
    setattr(automations, "run_coro_as_sync", later)  # noqa: B010


def make_app(login: str) -> ASGIApp:
    """Return Prefect's server behind our gate. login: `user:password`, which Prefect must have as
    its own, too: it checks the WebSockets.
    """
    from prefect.server.api.server import create_app

    app = create_app()
    mount = next(route for route in app.routes if getattr(route, "name", "") == "ui")
    pages = mount.app  # type: ignore[attr-defined]
    settings = next(route for route in pages.routes if route.path.endswith("ui-settings"))

    async def as_reached(request: Request) -> Response:
        """Return the pages' settings with the API at the host that the page came from, also
        `localhost` or a forwarded port.
        The browser is logged in already, so Prefect's form must not ask again.
        """
        reached = {"api_url": f"http://{request.headers['host']}/api", "auth": None}
        return JSONResponse(settings.endpoint().model_dump(mode="json") | reached)

    app.router.routes.insert(0, Route(settings.path, as_reached))
    return Gate(app, login, open_paths=("/api/health",), sockets=True)


if __name__ == "__main__":
    known = PREFECT_SERVER_API_AUTH_STRING.value()
    assert known is not None
    adapt_to_sqlite()
    serve(make_app(known), socket.socket(fileno=int(sys.argv[1])))
