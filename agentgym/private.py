"""What is this user's alone: the state folder, files with secrets, and the logins of this
project's own servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import struct
import sys
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from agentgym.config import ConfigError
from agentgym.store.files import discard, write_temp
from agentgym.store.lease import process_start
from agentgym.trust import without_login as without_login
from agentgym.types import Endpoint
from envs.wire import TOKEN_VARIABLE

STATE = Path(".agentgym")  # of the project in whose root the command was typed
SERVICES = "services.json"  # in it: what `make up` runs, and the login of both servers
USER = "agentgym"  # the one account of our servers

# what a run leaves beside its store; a folder that holds other things too is somebody's for other
# uses
_STATE_NAMES = {
    *("store", "logs", "delivered", "reports", "mlflow-artifacts", "cells"),
    *("evaluations", "fleets"),
}
# a default ACL (version 2: owner rwx, group and others nothing): whatever a program makes below is
# the owner's alone, also by programs that ask for 0777 with the umask off, as DVC does
_OWNER_ALONE = struct.pack(
    "<I" + 3 * "HHI", 2, *(0x01, 7, 2**32 - 1), *(0x04, 0, 2**32 - 1), *(0x20, 0, 2**32 - 1)
)


def private_folder(path: Path) -> Path:
    """The folder, made or tightened so that its owner alone can enter it. Result: `path`.

    Errors: ConfigError where it is somebody else's, leads to a place where others write, or was
    open to others who left something in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check(path)
    folder = path.stat()
    if folder.st_uid == os.geteuid():
        if stat.S_IMODE(folder.st_mode) != 0o700:
            path.chmod(0o700)
            _check_content(path)  # only now can nobody add to it
        # a file system without ACLs: the folder's own mode is what counts
        with contextlib.suppress(OSError):
            os.setxattr(path, "system.posix_acl_default", _OWNER_ALONE)
    return path


def claim_state() -> None:
    """Before a command does anything: the state folder is this user's alone.
    Ends the process with exit code 2 where it cannot be; where PREFECT_HOME was set to lie
    elsewhere, the folder above it is made too.
    """
    try:
        private_folder(STATE)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    Path(os.environ.get("PREFECT_HOME", STATE / "prefect")).parent.mkdir(
        parents=True, exist_ok=True
    )


def private_state(path: Path) -> Path:
    """`private_folder` for a run's state wherever it was configured to lie; a folder that holds
    other things than state keeps its mode.
    Errors: ConfigError, also where others can write in it.
    """
    if path.is_dir() and path.name != STATE.name and not _is_state(path):
        _check(path)
        if path.stat().st_mode & 0o002:
            raise ConfigError(
                f"{path} holds this run's state and everybody can write in it; set store.path to"
                f" {path}/agentgym/store"
            )
        return path
    return private_folder(path)


def write_private(path: Path, content: bytes) -> None:
    """A file that its owner alone can read, whole or not at all, also where a wider one lay
    before.
    """
    temporary = write_temp(path.parent, content, mode=0o600)
    try:
        temporary.replace(path)
    finally:
        discard(temporary)


def new_login() -> str:
    """`user:password` for one run of a server."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def with_login(url: str, login: str) -> str:
    """The same address with `login` in it; clients send it to that server alone."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{login}@{_address(parts)}").geturl()


def own_login(url: str) -> str | None:
    """The login of the server at `url` where it is one of this project's `make up`; None for
    anybody else's.
    """
    parts, services = urlsplit(url), _services()
    if process_start(int(services.get("pid", 0))) != services.get("started", ""):
        return None
    known = {
        _address(urlsplit(str(services[name])))
        for name in ("prefect", "mlflow")
        if name in services
    }
    is_ours = parts.scheme == "http" and _address(parts) in known
    return str(services["login"]) if is_ours and services.get("login") else None


def _address(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _services(state: Path = STATE) -> dict[str, Any]:
    try:
        said = json.loads((state / SERVICES).read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _check(path: Path) -> None:
    """Errors: ConfigError where another user than root decides what lies there."""
    try:
        entry, folder = path.lstat(), path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be used for state: {error.strerror}; remove it") from None
    if not stat.S_ISDIR(folder.st_mode):
        raise ConfigError(f"{path} is for state and is no folder; remove it")
    for found in (entry, folder):
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}; {_ADVICE}"
            )
    shared = bool(folder.st_mode & 0o002) and (
        stat.S_ISLNK(entry.st_mode) or folder.st_uid != os.geteuid()
    )
    if shared:
        raise ConfigError(f"{path} leads to {path.resolve()}, where everybody can write; {_ADVICE}")


_ADVICE = "remove it, or link it to a folder of your own"


def _check_content(path: Path) -> None:
    """Errors: ConfigError where another user left something while the folder was open."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            found = Path(folder, name)
            owner = found.lstat().st_uid
            if owner not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{path} was open to others, and {found} belongs to user {owner}; look at it,"
                    " then remove it"
                )


def _is_state(path: Path) -> bool:
    names = {entry.name for entry in path.iterdir()}
    return all(name in _STATE_NAMES or name.startswith(("mlflow.db", ".tmp-")) for name in names)


def token_of(endpoint: str, env: str = "") -> str:
    """What this server asks for: a server of ours its own, a configured one what this process's
    environment says, of that environment's servers (AGENTGYM_ENV_TOKEN_BABYAI) or of all.

    No file or log ever has either, and neither is sent to the other kind.
    """
    if isinstance(endpoint, Endpoint):
        return endpoint.token
    own = os.environ.get(token_variable(env), "").strip() if env else ""
    return own or os.environ.get(TOKEN_VARIABLE, "").strip()


def token_variable(env: str) -> str:
    """Names the token of one environment's servers, for example AGENTGYM_ENV_TOKEN_HIGHER_LOWER."""
    return f"{TOKEN_VARIABLE}_{re.sub('[^A-Z0-9]', '_', env.upper())}"
