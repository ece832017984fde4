"""Command line of the environment servers.

`python -m envs serve NAME` runs one environment server in this process.
`python -m envs identities NAME` prints a digest of each task: equal digests, equal tasks.
`python -m envs list` prints the installed environments.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.env import EnvSpec, UnknownTask
from envs.plain import plain
from envs.registry import known, load_spec
from envs.wire import TOKEN_VARIABLE


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
    except ImportError as error:  # only the simulators' own packages are optional
        return _refuse(f"{arguments.name} needs a package that is not installed here: {error}")
    except ValueError as error:
        return _refuse(str(error))
    if arguments.command == "identities":
        return _identities(spec)
    if arguments.check:
        return 0
    from envs.serving import serve  # imported here because it takes long and only `serve` needs it

    return serve(spec, arguments, _refuse)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m envs", description="Environment servers.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve one environment over HTTP",
        description=(
            f"Serve one environment over HTTP. If {TOKEN_VARIABLE} is set, requests must carry"
            " that token."
        ),
    )
    same = commands.add_parser(
        "identities",
        help="print a digest of each task; equal tasks have equal digests",
        description=(
            "Reads a JSON list of task ids. Writes a JSON list with a digest of each task, null for"
            " an unknown id, or null alone if the environment does not identify its tasks."
        ),
    )
    for command in (serve, same):
        command.add_argument("name", help="environment; `list` shows them")
        command.add_argument(
            "--options", default="{}", metavar="JSON", help="the environment's options"
        )
    add, default = serve.add_argument, "(default: %(default)s)"
    add("--host", default="127.0.0.1", help=f"address to bind {default}")
    add("--port", type=int, default=0, help="0 takes a free one (default)")
    add("--max-sessions", type=_positive_int, default=256, metavar="N", help=default)
    time: dict[str, Any] = {"type": _positive_float, "metavar": "S"}
    add("--session-ttl", **time, default=300.0, help="an idle session is closed after this")
    add("--drain-timeout", **time, default=20.0, help="for open sessions after SIGTERM")
    add("--expert", action="store_true", help="offer POST /expert; training refuses such servers")
    add("--expert-timeout", **time, default=5.0, help=default)
    add("--port-file", type=Path, metavar="PATH", help="holds the port while the server listens")
    add("--check", action="store_true", help="only say whether name and options are right")
    allowed = (
        "a host name that requests may use, in addition to localhost and the server's address;"
        " .NAME allows all subdomains"
    )
    name: dict[str, Any] = {"type": _host_name, "metavar": "NAME"}
    add("--allow-host", **name, action="append", default=[], help=allowed)
    unguarded = "accept requests without a token, also from other machines"
    add("--no-token", action="store_true", help=unguarded)
    orphan = "exit when stdin is closed: the server cannot outlive its owner"
    add("--owner-pipe", action="store_true", help=orphan)
    listed = (
        "print every environment and, if it cannot be served on this machine, the reason; one"
        " JSON object a line"
    )
    commands.add_parser("list", help=listed)
    return parser


def _list() -> int:
    """Print a JSON line for each environment: its name, and the reason if it cannot be served here.
    Always return 0: few users need all environments.
    """
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
    if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
        return _refuse("standard input must be a JSON list of task ids, whole numbers from 0")
    try:
        digests = spec.identity and [_digest(spec.identity, task_id) for task_id in ids]
        sys.stdout.write(json.dumps(digests) + "\n")
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


if __name__ == "__main__":
    # collect garbage less often: the worlds of open sessions are many objects, and so are imports
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)
    sys.exit(main())
