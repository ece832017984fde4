"""`python -m envs serve NAME`: one environment server in this process.
`python -m envs identities NAME`: which of its tasks are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import hashlib
import ipaddress
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from envs.connection import server_config
from envs.env import EnvSpec, UnknownTask
from envs.plain import log_to_stderr, plain
from envs.registry import known, load_spec
from envs.server import ServerSettings, make_app
from envs.sessions import Sessions
from envs.wire import TOKEN_VARIABLE

logger = logging.getLogger("envs")

ORPHAN_GRACE_S = 3.0  # for an orderly end once the owner is gone
# that may be open, where the system lets us: connections and the pipes of simulators
DESCRIPTORS = 65_536


class Server(uvicorn.Server):
    """Writes the port file when it listens; the first SIGTERM drains before it stops, which
    uvicorn does too late for open sessions.
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
            logger.info(
                "%s listens on http://%s:%d",
                self._sessions.spec.name,
                f"[{host}]" if ":" in host else host,
                port,
            )
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
        """Nobody is left to be waited for. Called from another thread."""
        self._sessions.abandon()
        self.should_exit = True

    def _start_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._sessions.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.command == "list":
        return _list()
    try:
        options = json.loads(arguments.options)
        if not isinstance(options, dict):
            raise ValueError(f"--options must be a JSON object, got {arguments.options!r}")
        spec = load_spec(arguments.name, options)
    except json.JSONDecodeError as error:
        return _refuse(f"--options is not JSON: {error}")
    except ValueError as error:
        return _refuse(str(error))
    if arguments.command == "identities":
        return _identities(spec)
    if arguments.check:
        return 0
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = os.environ.pop(TOKEN_VARIABLE, "").strip()  # what the simulators start does not get it
    if not (token.isascii() and token.isprintable()) or " " in token:
        return _refuse(f"{TOKEN_VARIABLE} must be of printable ASCII characters without blanks")
    if token and arguments.no_token:
        return _refuse(f"--no-token was given, and {TOKEN_VARIABLE} is set; leave one of them out")
    settings = ServerSettings(
        max_sessions=arguments.max_sessions,
        session_ttl_s=arguments.session_ttl,
        drain_timeout_s=arguments.drain_timeout,
        offer_expert=arguments.expert,
        expert_timeout_s=arguments.expert_timeout,
        token=token,
        hosts=tuple(arguments.allow_host),
    )
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(present, min(most, DESCRIPTORS)), most))
    app = make_app(spec, settings)
    try:
        listener = _listen(arguments.host, arguments.port)
    except OSError as error:
        return _refuse(f"cannot listen on {arguments.host}:{arguments.port}: {error}", code=1)
    address = listener.getsockname()[0]
    if not (token or arguments.no_token or ipaddress.ip_address(address).is_loopback):
        return _refuse(
            f"{address} is reached from other machines: set {TOKEN_VARIABLE} to a secret, for the"
            " server and for those who ask it, or say --no-token"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m envs", description="Environment servers.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve one environment over HTTP",
        description=(
            f"Serve one environment over HTTP. Where {TOKEN_VARIABLE} is set, requests must bear"
            " that token."
        ),
    )
    same = commands.add_parser(
        "identities",
        help="say which tasks are equal",
        description=(
            "Reads a JSON list of task ids. Writes a JSON list with a digest of each task, null for"
            " an id that names none, or null alone where the environment cannot say."
        ),
    )
    for each in (serve, same):
        each.add_argument("name", help="environment; `list` shows them")
        each.add_argument(
            "--options", default="{}", metavar="JSON", help="the environment's options"
        )
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    serve.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    serve.add_argument(
        "--max-sessions",
        type=_positive_int,
        default=256,
        metavar="N",
        help="(default: %(default)s)",
    )
    serve.add_argument(
        "--session-ttl",
        type=_positive_float,
        default=300.0,
        metavar="S",
        help="an idle session is closed after this",
    )
    serve.add_argument(
        "--drain-timeout",
        type=_positive_float,
        default=30.0,
        metavar="S",
        help="for open sessions after SIGTERM",
    )
    serve.add_argument(
        "--expert", action="store_true", help="offer POST /expert; training refuses such servers"
    )
    serve.add_argument(
        "--expert-timeout",
        type=_positive_float,
        default=5.0,
        metavar="S",
        help="(default: %(default)s)",
    )
    serve.add_argument(
        "--port-file", type=Path, metavar="PATH", help="holds the port while the server listens"
    )
    serve.add_argument(
        "--check", action="store_true", help="only say whether name and options are right"
    )
    serve.add_argument(
        "--allow-host",
        type=_host_name,
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "a name the server is asked under, beside localhost and its address; .NAME: any"
            " below it"
        ),
    )
    serve.add_argument(
        "--no-token",
        action="store_true",
        help="let whoever reaches it ask, also from other machines",
    )
    serve.add_argument(
        "--owner-pipe",
        action="store_true",
        help="exit when stdin is closed: the server cannot outlive its owner",
    )
    commands.add_parser(
        "list",
        help=(
            "every environment and, where it cannot be served on this machine, why; one JSON object"
            " a line"
        ),
    )
    return parser


def _list() -> int:
    """Exit code 0, also where some cannot be served: most users need one or two."""
    for name in sorted(known()):
        try:
            load_spec(name, {})
            missing = ""
        except (ValueError, ImportError) as error:
            missing = str(error)
        sys.stdout.write(json.dumps({"name": name, "missing": missing}) + "\n")
    return 0


def _identities(spec: EnvSpec) -> int:
    try:
        ids = json.load(sys.stdin)
    except ValueError as error:
        return _refuse(f"standard input must be a JSON list of task ids: {error}")
    if not isinstance(ids, list) or not all(
        type(task_id) is int and task_id >= 0 for task_id in ids
    ):
        return _refuse("standard input must be a JSON list of task ids, whole numbers from 0")
    try:
        sys.stdout.write(
            json.dumps(spec.identity and [_digest(spec.identity, task_id) for task_id in ids])
            + "\n"
        )
    finally:
        if spec.close is not None:
            spec.close()
    return 0


def _digest(identity: Callable[[int], str], task_id: int) -> str | None:
    try:
        return hashlib.sha256(identity(task_id).encode()).hexdigest()[:32]
    except UnknownTask:
        return None


def _positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def _host_name(text: str) -> str:
    if not re.fullmatch(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*", text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host name; leave scheme and port out")
    return text.lower()


def _positive_float(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return float(text)


def _refuse(message: str, code: int = 2) -> int:
    sys.stderr.write(plain(f"python -m envs: {message}\n"))
    return code


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _write(path: Path, text: str) -> None:
    """Whoever polls the file sees nothing or all of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # of a full disk


def _watch_owner(server: Server) -> None:
    """The kernel closes the pipe however the owner dies.
    A loop that no longer turns is not waited for.
    """
    while os.read(0, 4096):
        pass
    server.owner_is_gone()
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    # a third of the time of a short command is looking for garbage among its imports at the end
    atexit.register(gc.freeze)
    sys.exit(main())
