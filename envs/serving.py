"""One environment server as a process: its socket, port file, signals and end."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from envs.connection import server_config
from envs.env import EnvSpec
from envs.plain import log_to_stderr
from envs.server import ServerSettings, make_app
from envs.sessions import Sessions
from envs.wire import TOKEN_VARIABLE

logger = logging.getLogger("envs")

ORPHAN_GRACE_S = 3.0  # for an orderly shutdown once the owner is gone


def serve(spec: EnvSpec, arguments: argparse.Namespace, refuse: Callable[..., int]) -> int:
    """Serve until a signal stops the process or, with --owner-pipe, its owner is gone. Configure
    logging, remove the token's variable, and keep the port file while the server listens.

    arguments: those of `python -m envs serve`.
    refuse(message, code): reports an error and returns the exit code. Result: the exit code.
    """
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = os.environ.pop(TOKEN_VARIABLE, "").strip()  # hidden from the simulators' subprocesses
    if not (token.isascii() and token.isprintable()) or " " in token:
        return refuse(f"{TOKEN_VARIABLE} must be of printable ASCII characters without blanks")
    if token and arguments.no_token:
        return refuse(f"--no-token was given, and {TOKEN_VARIABLE} is set; leave one of them out")
    settings = ServerSettings(
        max_sessions=arguments.max_sessions,
        session_ttl_s=arguments.session_ttl,
        drain_timeout_s=arguments.drain_timeout,
        offer_expert=arguments.expert,
        expert_timeout_s=arguments.expert_timeout,
        token=token,
        hosts=tuple(arguments.allow_host),
    )
    app = make_app(spec, settings)
    try:
        listener = _listen(arguments.host, arguments.port)
    except OSError as error:
        return refuse(f"cannot listen on {arguments.host}:{arguments.port}: {error}", code=1)
    address = listener.getsockname()[0]
    if not (token or arguments.no_token or ipaddress.ip_address(address).is_loopback):
        return refuse(
            f"{address} is reached from other machines: set {TOKEN_VARIABLE} to a secret, for the"
            " server and for its clients, or pass --no-token"
        )
    server = Server(
        server_config(app, settings.max_sessions), app.state.sessions, arguments.port_file
    )
    if arguments.owner_pipe:
        threading.Thread(target=_watch_owner, args=(server,), name="owner", daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    finally:
        if arguments.port_file is not None:
            arguments.port_file.unlink(missing_ok=True)
    return 0 if server.started else 1


class Server(uvicorn.Server):
    """uvicorn's server that writes a port file once it listens. The first SIGTERM waits for open
    sessions, then closes the socket (uvicorn alone closes it first). Other signals do not wait.
    """

    def __init__(self, config: uvicorn.Config, sessions: Sessions, port_file: Path | None) -> None:
        super().__init__(config)
        self._sessions = sessions
        self._port_file = port_file
        self._loop: asyncio.AbstractEventLoop | None = None
        self._terminated = False
        self._draining: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if sockets and not self.should_exit:
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logger.info("%s listens on http://%s:%d", self._sessions.spec.name, shown, port)
            if self._port_file is not None:
                _write(self._port_file, f"{port}\n")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and self._loop is not None and not self._terminated:
            self._terminated = True
            self._loop.call_soon_threadsafe(self._start_drain)
        else:
            self._sessions.abandon()
            super().handle_exit(sig, frame)

    def owner_is_gone(self) -> None:
        """Stop without waiting for sessions. Called from another thread."""
        self._sessions.abandon()
        self.should_exit = True

    def _start_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._sessions.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a reader that polls it sees nothing or the whole text."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # left over if the disk is full


def _watch_owner(server: Server) -> None:
    """Wait until the kernel closes stdin's pipe, which it does however the owner dies; then stop
    the server, and after ORPHAN_GRACE_S exit with code 1 even if its event loop hangs.
    """
    while os.read(0, 4096):
        pass
    server.owner_is_gone()
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)
