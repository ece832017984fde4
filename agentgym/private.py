"""Private state of the user: the state folder, files with secrets, logins of our servers."""

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
from urllib.parse import SplitResult, urlsplit

from agentgym.config import ConfigError
from agentgym.store.lease import process_start
from agentgym.store.posix import write_whole
from agentgym.trust import without_login as without_login
from agentgym.types import Endpoint
from envs.wire import TOKEN_VARIABLE

STATE = Path(".agentgym")  # of the project whose root is the working directory
SERVICES = "services.json"  # addresses and login of the servers of `make up`
USER = "agentgym"  # the one account of our servers

# names that a run writes next to its store; a folder with other files has other uses
_STATE_NAMES = {
    *("store", "logs", "delivered", "reports", "mlflow-artifacts", "cells"),
    *("evaluations", "fleets"),
}
# a default ACL (version 2: owner rwx, group and others nothing): only the owner can read what
# programs create below, also if they ask for 0777 with the umask off, as DVC does
_OWNER_ALONE = struct.pack(
    "<I" + 3 * "HHI", 2, *(0x01, 7, 2**32 - 1), *(0x04, 0, 2**32 - 1), *(0x20, 0, 2**32 - 1)
)

_UNCHECKED = 0o1700  # as private as 0o700; the sticky bit marks a folder whose content was refused


def private_folder(path: Path) -> Path:
    """Create a folder and its parents, or restrict an existing folder of this user: from then on
    only its owner can enter it or read new files in it. Result: `path`.

    A folder of root is left as it is.
    Errors: ConfigError if it is no folder, belongs to another user, contains files of other users
    from before it was restricted, or if everybody can write in it and it is root's or a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check(path)
    folder = path.stat()
    if folder.st_uid == os.geteuid():
        if stat.S_IMODE(folder.st_mode) != 0o700:
            path.chmod(_UNCHECKED)
            _check_content(path)  # from now on no other user can add to it
            path.chmod(0o700)
        # on a file system without ACLs the folder's own mode must do
        with contextlib.suppress(OSError):
            os.setxattr(path, "system.posix_acl_default", _OWNER_ALONE)
    return path


def claim_state() -> None:
    """Make the state folder private, and create the parent folder of PREFECT_HOME.

    Call it before a command does anything. If the state folder is refused, it prints the error and
    ends the process with exit code 2.
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
    """Make the configured state folder of a run private, see `private_folder`. Result: `path`.
    An existing folder that is not named .agentgym and has files of other uses is left as it is.
    Errors: ConfigError, also if everybody can write in such a folder.
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
    """Write a file atomically that only its owner can read, also over a file with a wider mode."""
    write_whole(path, content, mode=0o600)


def new_login() -> str:
    """Return a new `user:password` for one run of a server."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def with_login(url: str, login: str) -> str:
    """Return the URL with `login` (`user:password`), which replaces any other login in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{login}@{_address(parts)}").geturl()


def own_login(url: str) -> str | None:
    """Return the login (`user:password`) of the running `make up` if `url` is the address of its
    Prefect or MLflow. None for other URLs, and if no `make up` of this project runs.
    """
    try:
        services = json.loads((STATE / SERVICES).read_bytes())
        process = process_start(int(services["pid"]))
        started = services["started"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if process != started:
        return None
    parts = urlsplit(url)
    known = {
        _address(urlsplit(str(services[name])))
        for name in ("prefect", "mlflow")
        if name in services
    }
    is_ours = parts.scheme == "http" and _address(parts) in known
    return str(services["login"]) if is_ours and services.get("login") else None


def _address(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _check(path: Path) -> None:
    """Raise ConfigError if `path` cannot be read or is no folder, if it belongs to a user other
    than this one and root, or if everybody can write in it and it is root's or a link.
    """
    try:
        entry, folder = path.lstat(), path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be used for state: {error.strerror}; remove it") from None
    if not stat.S_ISDIR(folder.st_mode):
        raise ConfigError(f"{path} is for state and is no folder; remove it")
    for status in (entry, folder):
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, this is user {os.geteuid()}; {_ADVICE}"
            )
    shared = bool(folder.st_mode & 0o002) and (
        stat.S_ISLNK(entry.st_mode) or folder.st_uid != os.geteuid()
    )
    if shared:
        raise ConfigError(f"{path} leads to {path.resolve()}, where everybody can write; {_ADVICE}")


_ADVICE = "remove it, or link it to a folder of your own"


def _check_content(path: Path) -> None:
    """Raise ConfigError if an entry below `path` belongs to a user other than this one and root."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            entry = Path(folder, name)
            owner = entry.lstat().st_uid
            if owner not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{path} was open to others, and {entry} belongs to user {owner}; look at it,"
                    " then remove it"
                )


def _is_state(path: Path) -> bool:
    names = {entry.name for entry in path.iterdir()}
    return all(name in _STATE_NAMES or name.startswith(("mlflow.db", ".tmp-")) for name in names)


def token_of(endpoint: str, env: str = "") -> str:
    """Return the bearer token that an environment server requires; empty if none is known.

    The `Endpoint` of a server that this project started contains its token. For any other address
    the token is in the environment variable of `env`, for example AGENTGYM_ENV_TOKEN_BABYAI, or
    else in AGENTGYM_ENV_TOKEN. Neither kind of server receives a token of the other kind.
    """
    if isinstance(endpoint, Endpoint):
        return endpoint.token
    token = os.environ.get(token_variable(env), "").strip() if env else ""
    return token or os.environ.get(TOKEN_VARIABLE, "").strip()


def token_variable(env: str) -> str:
    """Name of the variable with the token of `env`, e.g. AGENTGYM_ENV_TOKEN_HIGHER_LOWER."""
    return f"{TOKEN_VARIABLE}_{re.sub('[^A-Z0-9]', '_', env.upper())}"
