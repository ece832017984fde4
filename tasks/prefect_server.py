"""A Prefect server for the length of one command.

Prefect's own temporary server outlives a killed client; this one watches a pipe and ends with its owner. One that dies
is brought back on its port with its database, within what Prefect's client waits for an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from agentgym.deploy.owned import end_with_owner, tail
from tasks.services import STATE, is_stale
from tasks.supervisor import CHECK_S, Service, healthy

START_TIMEOUT_S = 180.0
POLL_S = 0.1
DRAIN_TIMEOUT_S = 10.0


@contextlib.contextmanager
def prefect_api(state_dir: Path) -> Iterator[str]:
    """The API's address: the configured server where PREFECT_API_URL names one, that of `make up` while it runs, else a server
    on a free loopback port.

    Errors: RuntimeError with the end of the server's log.
    """
    # prefect.toml may name the server of a `make up` that was killed since
    configured = None if "PREFECT_API_URL" not in os.environ and is_stale(STATE) else PREFECT_API_URL.value()
    if configured:
        yield configured
        return
    log_path = state_dir / "logs" / "prefect-server.log"
    environment = {"PREFECT_UI_ENABLED": "0", "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
    with contextlib.ExitStack() as stack:
        with _alone(state_dir / "logs" / "prefect-server.lock"):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            command = [sys.executable, "-m", "tasks.prefect_server", str(port)]
            service = Service("the Prefect server", command, log_path, environment)
            stack.callback(service.close)
            service.keep()
            assert service.process is not None
            api = f"http://127.0.0.1:{port}/api"
            deadline = time.monotonic() + START_TIMEOUT_S
            while not healthy(f"{api}/health"):
                if service.process.poll() is not None:
                    raise RuntimeError(f"Prefect server exited with code {service.process.returncode} while starting\n{tail(log_path)}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Prefect server did not come up within {START_TIMEOUT_S:g} s\n{tail(log_path)}")
                time.sleep(POLL_S)
        stack.enter_context(_kept(service))
        stack.enter_context(temporary_settings({PREFECT_API_URL: api}))
        try:
            yield api
        finally:
            # what is still queued would try the ended server for a minute when the interpreter exits
            APILogWorker.drain_all(timeout=DRAIN_TIMEOUT_S)
            EventsWorker.drain_all(timeout=DRAIN_TIMEOUT_S)


@contextlib.contextmanager
def _kept(service: Service) -> Iterator[None]:
    """Bring it back when it dies."""
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


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One server of a project starts at a time: two would create the tables of their one database at once, and one would fail."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with its holder, who has START_TIMEOUT_S
        yield


if __name__ == "__main__":
    import uvicorn

    end_with_owner()
    uvicorn.run(
        "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", lifespan="on"
    )
