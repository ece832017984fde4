"""`make up` and `make down`: the servers of this project under one supervisor (supervisor.py).

All state lies in `.agentgym`; a `prefect.toml` in the project's root points every `prefect` command
typed there at this server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentgym.config import ConfigError
from agentgym.console.ending import guarded
from agentgym.defaults import VIEWER_PORT
from agentgym.deploy.owned import tail
from agentgym.private import STATE, new_login, private_folder, with_login, write_private
from agentgym.store.lease import process_start
from agentgym.viewer.guard import LOGIN
from services.applied import FILE, apply
from services.proxy import listener, serve
from services.state import (
    POLL_S,
    POOL,
    START_TIMEOUT_S,
    Services,
    forget,
    locked,
    log_file,
    running,
    toml_is_ours,
)

# used if free; the supervisor gets the sockets in this order
PORTS = {"prefect": 4200, "mlflow": 5000, "viewer": VIEWER_PORT}

STOP_TIMEOUT_S = 60.0


def up(state: Path, ports: Mapping[str, int | None]) -> int:
    """Start the services or apply prefect.yaml to live ones; print addresses. Result: see `status`.

    ports: by service, see PORTS. None: the usual one if it is free, else any.
    Errors: ConfigError if a given port is taken; RuntimeError if the services do not start (after
    START_TIMEOUT_S they are ended); those of `apply`.
    """
    with _alone(state):
        services = running(state)
        if services is not None and services.ready:
            print("already running")
            if "prefect" in services.pids:
                for line in apply(services) or ["nothing in it has changed"]:
                    print(f"applied  {FILE}: {line}", flush=True)
            else:
                is_down = "is not applied while the Prefect server is down"
                print(f"{FILE} {is_down}; `make up` again does it")
            return _describe(services)
        process = None  # stays None if an interrupted `make up` has started the supervisor
        if services is None:
            # the supervisor has its own copies of the descriptors
            with contextlib.ExitStack() as stack:
                bound = [
                    stack.enter_context(_listener(ports.get(name), usual, f"{name.upper()}_PORT"))
                    for name, usual in PORTS.items()
                ]
                process = _start_supervisor(state, [listening.fileno() for listening in bound])
            what = "Prefect, a worker, MLflow and the viewer"
            print(f"starting {what}; this takes half a minute", flush=True)
        log, deadline = log_file(state, "supervisor"), time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            services = running(state)
            if services is not None and services.ready:
                return _describe(services)
            is_gone = services is None if process is None else process.poll() is not None
            if is_gone:
                raise RuntimeError(f"the services did not start\n{tail(log)}")
            time.sleep(POLL_S)
        _stop(state)
        raise RuntimeError(f"the services did not start within {START_TIMEOUT_S:g} s\n{tail(log)}")


def down(state: Path) -> int:
    """End everything that `up` started, if it runs, and remove its record; return 0.
    Errors: RuntimeError if it does not end.
    """
    with _alone(state):
        services = running(state)
        if services is None:
            forget(state)  # the record of a killed supervisor
            print("nothing is running")
            return 0
        _stop(state)
    print("stopped; after `make up`, interrupted runs continue from their last commit")
    return 0


def status(state: Path) -> int:
    """Print the services and their states. Result: 0 if all of them run, else 1."""
    services = running(state)
    if services is None:
        print("nothing is running; `make up` starts it")
        return 1
    return _describe(services)


def _describe(services: Services) -> int:
    addresses = {
        "prefect": services.prefect,
        "worker": f"pool {POOL}",
        "mlflow": services.mlflow,
        "viewer": services.viewer,
    }
    if "engine" in (*services.pids, *services.given_up):
        addresses["engine"] = "kept between runs"
    for name, address in addresses.items():
        is_given_up = name in services.given_up
        state = "died too often, see .agentgym/logs" if is_given_up else "is being restarted"
        if pid := services.pids.get(name):
            state = f"process {pid}"
        print(f"{name:<9}{address:<28}{state}")
    command = "prefect deployment run pipeline/local --watch"
    # a prefect.toml of the user's own has no login: the command then gets the address with a login
    if not toml_is_ours():
        command = f"PREFECT_API_URL=$(python -m services api) {command}"
    print(f"{'start':<9}{command}")
    for address in filter(None, (services.prefect, services.mlflow, services.viewer)):
        print(f"{'open':<9}{with_login(address + LOGIN, services.login)}")
    return 0 if addresses.keys() <= services.pids.keys() else 1


def print_api(state: Path) -> int:
    """Print the API's address with its login; return 0. Errors: ConfigError if nothing runs."""
    services = running(state)
    if services is None:
        raise ConfigError("nothing is running; `make up` starts it")
    print(with_login(services.api, services.login))
    return 0


def show_mlflow(state: Path, port: int | None) -> int:
    """Print MLflow's address, open it if there is a desktop, and run MLflow alone until Ctrl-C;
    return 0. port: as in `up`.
    """
    from services.mlflow_server import make_app

    with _listener(port, PORTS["mlflow"], "PORT", command="make ui") as bound:
        address, login = f"http://127.0.0.1:{bound.getsockname()[1]}", new_login()
        app = make_app(state, login)
        link = with_login(address + LOGIN, login)
        print(f"MLflow   {address}\n{'open':<9}{link}", flush=True)
        _open(link, state / "mlflow.html")
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, bound, owned=False)
    return 0


def _open(link: str, page: Path) -> None:
    """Open a link with a login in the desktop's browser, if a user at a desktop started us.
    page: a private file that leads there, since everybody can read the browser's command line.
    """
    desktop = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if desktop and sys.stdout.isatty():
        write_private(page, f'<meta http-equiv="refresh" content="0; url={link}">'.encode())
        # a thread, because some browsers return only when they are closed
        address = page.resolve().as_uri()
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _start_supervisor(state: Path, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    log = log_file(state, "supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "services.supervisor", "supervise", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives the terminal
            pass_fds=tuple(descriptors),
        )


def _stop(state: Path) -> None:
    """End the supervisor, by SIGTERM, else by SIGKILL, and with it the services; remove its record.
    Errors: RuntimeError if it stays.
    """
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


def _listener(
    wanted: int | None, usual: int, variable: str, command: str = "make up"
) -> socket.socket:
    """Return a listening socket at the wanted port; if that is None, at the usual one or any.

    command, variable: named in the error. Errors: ConfigError if the wanted port cannot be used.
    """
    try:
        return listener(usual if wanted is None else wanted)
    except OSError as error:
        if wanted is None:
            return listener(0)
        raise ConfigError(
            f"port {wanted} cannot be used ({os.strerror(error.errno or 0)}); choose another with"
            f" {command} {variable}=..."
        ) from None


def _alone(state: Path) -> contextlib.AbstractContextManager[None]:
    """Make the state folder private and return a context manager. It waits until no other `make up`
    or `make down` runs, and locks them out during the block.
    """
    private_folder(state)
    return locked(state / "services.lock")


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit codes as in `agentgym.cli.main`."""
    parser = argparse.ArgumentParser(
        prog="python -m services", description="The servers of this project."
    )
    commands = parser.add_subparsers(required=True, metavar="up | down | status | api | ui")
    start = commands.add_parser(
        "up", help="start a Prefect server, a worker, MLflow and the viewer; no effect if they run"
    )
    for name in PORTS:
        start.add_argument(f"--{name}-port", type=int, dest=name)
    start.set_defaults(run=lambda chosen: up(STATE, {n: getattr(chosen, n) for n in PORTS}))
    commands.add_parser("down", help="end them").set_defaults(run=lambda _: down(STATE))
    commands.add_parser("status", help="print what runs").set_defaults(run=lambda _: status(STATE))
    api = commands.add_parser("api", help="the address of Prefect's API with its login")
    api.set_defaults(run=lambda _: print_api(STATE))
    pages = commands.add_parser("ui", help="MLflow alone, until Ctrl-C")
    pages.add_argument("--port", type=int)
    pages.set_defaults(run=lambda chosen: show_mlflow(STATE, chosen.port))
    parsed = parser.parse_args(argv)
    return guarded(lambda: int(parsed.run(parsed)))


if __name__ == "__main__":
    sys.exit(main())
