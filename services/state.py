"""This project's servers and addresses: `.agentgym/services.json`, `prefect.toml`."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.config import RunConfig, load_config
from agentgym.private import SERVICES
from agentgym.store.lease import process_start

TOML = Path("prefect.toml")  # Prefect reads it in the working directory
TOML_MARK = "# written by `make up`, removed by `make down`"
POOL = "local"
PARAMS = Path("params.yaml")

START_TIMEOUT_S = 300.0
POLL_S = 0.1


@dataclass(frozen=True)
class Services:
    """The supervisor's record of its services, in `.agentgym/services.json`."""

    pid: int
    started: str  # distinguishes it from a later process of that pid
    prefect: str  # address; the API is below /api
    mlflow: str
    login: str = field(default="", repr=False)  # user:password of all services, new at every start
    ready: bool = False  # pools, deployments and automations are there
    # service -> its process; absent while it is down
    pids: dict[str, int] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()  # services that died too often
    viewer: str = ""  # address of the pages of `agentgym view`

    @property
    def api(self) -> str:
        return f"{self.prefect}/api"


def running(state: Path) -> Services | None:
    """Return the record of this project's live supervisor, or None if none lives."""
    try:
        services = Services(**json.loads(state_file(state).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return services if process_start(services.pid) == services.started else None


def is_stale(state: Path) -> bool:
    """Return True if prefect.toml names the server of a supervisor that is gone."""
    return TOML.exists() and toml_is_ours() and running(state) is None


def toml_is_ours() -> bool:
    """Return True if we may write and remove prefect.toml; a user's own stays as it is."""
    return not TOML.exists() or TOML.read_text(encoding="utf-8").startswith(TOML_MARK)


def forget(state: Path) -> None:
    """Remove the record of running services, and prefect.toml unless it is the user's own."""
    state_file(state).unlink(missing_ok=True)
    if toml_is_ours():
        TOML.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file; keep it for the block, or until this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def project_config() -> RunConfig:
    """Load the project's parameter file; the defaults if it is missing. Errors: ConfigError."""
    return load_config(PARAMS) if PARAMS.is_file() else RunConfig()


def state_file(state: Path) -> Path:
    """Return the path of the supervisor's record."""
    return state / SERVICES


def log_file(state: Path, name: str) -> Path:
    """Return the path of a service's log."""
    return state / "logs" / f"{name}.log"
