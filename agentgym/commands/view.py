"""`agentgym view`: pages about the runs in the store."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agentgym.commands.parser import Commands
from agentgym.config import ConfigError, RunConfig
from agentgym.console.ending import say
from agentgym.defaults import VIEWER_PORT as PORT


def add(commands: Commands) -> None:
    view = commands.add("view", _view, "pages of what agents did, in a browser")
    option = view.add_argument
    option("runs", nargs="*", metavar="RUN", help="beginnings of names of runs (default: all)")
    option(
        "--host",
        default="127.0.0.1",
        help="address to listen at; others than loopback are for networks you trust (default:"
        " %(default)s)",
    )
    option("--port", type=int, help=f"default: {PORT} if it is free, else another")
    option(
        "--name",
        action="append",
        default=[],
        help="a name under which others reach this machine, in addition to the address it listens"
        " at",
    )

    option(
        "--query",
        default="",
        help="with --bundle, --jsonl and --agentgym: the part after"
        " the ? in the address of a list, for example env=babyai&success=no",
    )
    option(
        "--bundle",
        type=Path,
        metavar="FOLDER",
        help="write pages that open from a file, of up to 500 episodes, and end",
    )
    option("--jsonl", type=Path, metavar="FILE", help="write the episodes as JSON lines, and end")
    option(
        "--agentgym",
        type=Path,
        metavar="FILE",
        help="write them as trajectories in AgentGym's published layout, which `agentgym data"
        " import-trajectories` reads, and end",
    )


def _take_away(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from urllib.parse import parse_qsl

    from agentgym.viewer.bundle import write_bundle, write_conversations, write_lines
    from agentgym.viewer.query import FACETS, SINGLE, BadQuery, Query
    from agentgym.viewer.viewer import Viewer

    try:
        pairs = parse_qsl(arguments.query)
        if unknown := {name for name, _ in pairs}.difference(FACETS, SINGLE):
            names = ", ".join((*FACETS, *SINGLE))
            raise BadQuery(f"{', '.join(sorted(unknown))} is no filter; expected {names}")
        query = Query.parse(pairs)
    except BadQuery as error:
        raise ConfigError(f"--query: {error}") from None
    with contextlib.closing(Viewer.open(cfg)) as viewer:
        if viewer.index.writes:
            viewer.refresh()
        if arguments.runs:
            runs = viewer.lists.runs(tuple(arguments.runs))
            if not runs:
                raise ConfigError(f"no run of this store begins with {' or '.join(arguments.runs)}")
            query = replace(query, facets={**query.facets, "run": runs})
        if arguments.bundle is not None:
            count = write_bundle(viewer, query, arguments.bundle)
            say(f"{count} episodes: {arguments.bundle / 'index.html'}")
        if arguments.jsonl is not None:
            say(f"{write_lines(viewer, query, arguments.jsonl)} episodes: {arguments.jsonl}")
        if arguments.agentgym is not None:
            count, left_out = write_conversations(viewer, query, arguments.agentgym)
            say(
                f"{count} trajectories: {arguments.agentgym}; left out, because they repeat another"
                f" or cannot be imported: {left_out}"
            )
    return 0


def _view(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    if any(path is not None for path in (arguments.bundle, arguments.jsonl, arguments.agentgym)):
        return _take_away(cfg, arguments)
    if arguments.query:
        raise ConfigError("--query goes with --bundle, --jsonl or --agentgym; in a browser, filter")
    import uvicorn

    from agentgym.private import USER, with_login
    from agentgym.viewer.app import make_app
    from agentgym.viewer.guard import LOGIN, LOOPBACK, Guard
    from agentgym.viewer.viewer import FOLDER, Viewer
    from envs.connection import bounded

    token = own_token(cfg.state_dir / FOLDER)
    with _listener(arguments.host, arguments.port) as bound:
        host, port = arguments.host, bound.getsockname()[1]
        with Viewer.open(cfg, tuple(arguments.runs)) as viewer:
            app = Guard(make_app(viewer), {*LOOPBACK, host, *arguments.name}, port, token)
            shown = arguments.name[0] if arguments.name else host
            page = with_login(f"http://{shown}:{port}{LOGIN}", f"{USER}:{token}")
            # flush, because a program may read it through a pipe
            print(f"agentgym view: {page}  (Ctrl-C ends it)", flush=True)
            config = bounded(app, server_header=False, ws="none")
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[bound])
    return 0


def own_token(folder: Path) -> str:
    """Return the login token in `folder`, which stays the same so that links stay valid. Create the
    private folder, and a new token if there is none of at least 32 characters. Errors: ConfigError.
    """
    from agentgym.private import private_folder, write_private

    file = private_folder(folder) / "token"
    with contextlib.suppress(FileNotFoundError):
        stored = file.read_text(encoding="utf-8").strip()
        if len(stored) >= 32:
            return stored
    token = secrets.token_urlsafe(32)
    write_private(file, token.encode())
    return token


@contextlib.contextmanager
def _listener(host: str, wanted: int | None) -> Iterator[socket.socket]:
    """Yield a listening socket, closed after the block. host: address to listen at. wanted: port;
    None: the default port, or any if that is taken.
    Errors: ConfigError if no socket can be bound, for example because the port is taken.
    """
    for port in (PORT, 0) if wanted is None else (wanted,):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            if wanted is None and port:
                continue
            raise ConfigError(
                f"nothing can listen at {host} port {port} ({error.strerror}); name another with"
                " --host and --port"
            ) from None
        with bound:
            bound.listen()
            yield bound
        return
