"""`make up` and `make down`: the Prefect server, a worker and MLflow of this project, under one supervisor (tasks/supervisor.py).

All state lies in `.agentgym`; a `prefect.toml` in the project's root points every `prefect` command typed there at this server.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from agentgym.cli import guarded
from agentgym.config import ConfigError
from agentgym.deploy.owned import tail
from agentgym.store.lease import process_start

logger = logging.getLogger(__name__)

STATE = Path(".agentgym")
TOML = Path("prefect.toml")  # Prefect reads it in the working directory
TOML_MARK = "# written by `make up`, removed by `make down`"
POOL = "local"
PORTS = {"prefect": 4200, "mlflow": 5000}  # taken where free

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.3


@dataclass(frozen=True)
class Services:
    """What the supervisor says of itself, in `.agentgym/services.json`."""

    pid: int
    started: str  # tells it from a later process of that pid
    prefect: str  # address; the API is below /api
    mlflow: str
    ready: bool = False  # pools, deployments and automations are there
    pids: dict[str, int] = field(default_factory=dict)  # service -> its process; absent while it is down
    given_up: tuple[str, ...] = ()  # services that died too often

    @property
    def api(self) -> str:
        return f"{self.prefect}/api"


def running(state: Path) -> Services | None:
    """The supervisor of this project, where one lives."""
    try:
        services = Services(**json.loads(state_file(state).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return services if process_start(services.pid) == services.started else None


def is_stale(state: Path) -> bool:
    """Does prefect.toml name the server of a supervisor that is gone."""
    return TOML.exists() and toml_is_ours() and running(state) is None


def up(state: Path, prefect_port: int | None, mlflow_port: int | None) -> int:
    """Start what is not running and say where it is. Result: an exit code."""
    with _alone(state):
        services = running(state)
        if services is not None and services.ready:
            print("already running")
            return _describe(services)
        if services is None:
            ports = [_port(prefect_port, PORTS["prefect"], "PREFECT_PORT"), _port(mlflow_port, PORTS["mlflow"], "MLFLOW_PORT")]
            process = _start_supervisor(state, ports)
            print("starting a Prefect server, a worker and MLflow; half a minute on a quiet machine", flush=True)
        else:
            process = None  # an interrupted `make up` left it starting
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            services = running(state)
            if services is not None and services.ready:
                return _describe(services)
            if (process is not None and process.poll() is not None) or (process is None and services is None):
                raise RuntimeError(f"the services did not start\n{tail(log_file(state, 'supervisor'))}")
            time.sleep(POLL_S)
        _stop(state)
        raise RuntimeError(f"the services did not start within {START_TIMEOUT_S:g} s\n{tail(log_file(state, 'supervisor'))}")


def down(state: Path) -> int:
    """End everything `up` started. Result: an exit code."""
    with _alone(state):
        services = running(state)
        if services is None:
            forget(state)  # of a supervisor that was killed
            print("nothing is running")
            return 0
        _stop(state)
    print("stopped; runs that were under way go on from their last commit after the next `make up`")
    return 0


def status(state: Path) -> int:
    """Say what runs. Result: 0 where everything does, else 1."""
    services = running(state)
    if services is None:
        print("nothing is running; `make up` starts it")
        return 1
    return _describe(services)


def _describe(services: Services) -> int:
    for name, address in (("prefect", services.prefect), ("worker", f"pool {POOL}"), ("mlflow", services.mlflow)):
        pid = services.pids.get(name)
        state = f"process {pid}" if pid else "died too often, see .agentgym/logs" if name in services.given_up else "is being restarted"
        print(f"{name:<9}{address:<28}{state}")
    command = "prefect deployment run pipeline/local --watch"
    print(f"{'start':<9}{command if toml_is_ours() else f'PREFECT_API_URL={services.api} {command}'}")
    return 0 if len(services.pids) == 3 else 1


def _start_supervisor(state: Path, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    log = log_file(state, "supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.supervisor", "supervise", *map(str, ports)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives the terminal
        )


def _stop(state: Path) -> None:
    """SIGTERM to the supervisor, SIGKILL where it hangs; its services end with it either way."""
    services = running(state)
    if services is None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(services.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if process_start(services.pid) != services.started:
                forget(state)
                return
            time.sleep(POLL_S)
    raise RuntimeError(f"the supervisor, process {services.pid}, does not end")


def toml_is_ours() -> bool:
    """May we write and remove prefect.toml; somebody's own stays as it is."""
    return not TOML.exists() or TOML.read_text().startswith(TOML_MARK)


def forget(state: Path) -> None:
    """Remove what says that something runs."""
    state_file(state).unlink(missing_ok=True)
    if toml_is_ours():
        TOML.unlink(missing_ok=True)


def state_file(state: Path) -> Path:
    """Where the supervisor says what it runs."""
    return state / "services.json"


def log_file(state: Path, name: str) -> Path:
    """The output of one service."""
    return state / "logs" / f"{name}.log"


def _port(wanted: int | None, usual: int, variable: str) -> int:
    """The wanted port; without a wish the usual one where it is free, else any. Errors: ConfigError where the wanted one is taken."""
    for port in [wanted] if wanted is not None else [usual, 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if wanted is not None:
                    raise ConfigError(
                        f"port {wanted} cannot be used ({error.strerror}); choose another with make up {variable}=..."
                    ) from None
                continue
            return int(probe.getsockname()[1])
    raise RuntimeError("no free port on 127.0.0.1")


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[IO[bytes]]:
    """One `make up` or `make down` at a time; it ends with its holder."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "services.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def main(argv: list[str] | None = None) -> int:
    """Exit codes as everywhere; see `agentgym.cli.main`."""
    parser = argparse.ArgumentParser(prog="python -m tasks.services", description="The servers of this project.")
    commands = parser.add_subparsers(required=True, metavar="up | down | status")
    start = commands.add_parser("up", help="start a Prefect server, a worker and MLflow; harmless where they run")
    start.add_argument("--prefect-port", type=int)
    start.add_argument("--mlflow-port", type=int)
    start.set_defaults(run=lambda chosen: up(STATE, chosen.prefect_port, chosen.mlflow_port))
    commands.add_parser("down", help="end them").set_defaults(run=lambda _: down(STATE))
    commands.add_parser("status", help="say what runs").set_defaults(run=lambda _: status(STATE))
    parsed = parser.parse_args(argv)
    return guarded(lambda: int(parsed.run(parsed)))


if __name__ == "__main__":
    sys.exit(main())
