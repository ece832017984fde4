"""The process that `make up` starts: it runs Prefect's server, a worker, MLflow, the viewer and,
with vLLM, an engine; it restarts and ends them. They watch a pipe from it, so none outlives it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from agentgym.config import ConfigError
from agentgym.console.ending import guarded
from agentgym.deploy.owned import end_with_owner, owned_process, tail
from agentgym.private import STATE, new_login, with_login, write_private
from agentgym.rollouts.policies.engines import HOSTED
from agentgym.rollouts.policies.hosts import KEPT, host_command, host_environment, new_folder
from agentgym.store.lease import process_start
from agentgym.store.runstore import StorePlace
from services import mlflow_server
from services.applied import client_environment, set_up
from services.overdue import bring_back, opened
from services.state import (
    POLL_S,
    POOL,
    START_TIMEOUT_S,
    TOML,
    TOML_MARK,
    Services,
    forget,
    log_file,
    project_config,
    state_file,
    toml_is_ours,
)

logger = logging.getLogger(__name__)

KUBERNETES_POOL = "kubernetes"
JOB_TEMPLATE = Path("k8s/prefect/base-job-template.json")
POOL_LIMIT = 4  # flow runs of this machine at a time; deployments have their own limits, too
CHECK_S = 1.0  # between two looks at the services
OVERDUE_CHECK_S = 15.0  # between two looks for overdue flow runs
BUCKET_CHECK_S = 300.0  # between two looks for dead runs in a bucket: one request for each step
MAX_RESTARTS, RESTART_WINDOW_S = 5, 600.0  # of one service
WORKER_GRACE_S = 8.0  # shorter than its owner waits
VIEWER_LOGIN = "AGENTGYM_VIEWER_LOGIN"  # environment variable: user:password
OURS = (sys.executable, "-m", "services.supervisor")  # followed by a command of `main`


class Undertaker:
    """Watcher of the store. It lets a child process close MLflow runs whose own process is gone."""

    def __init__(self) -> None:
        self._live: set[str] = set()  # tokens of holders
        self._due = [0.0]  # on the monotonic clock; the first is for runs from before this start
        self._not_before = 0.0
        self._child: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Start the child process if it is due and none runs: at the first call, when the holder
        of a lease in the store is gone, and a lease's length after that.
        A bucket is read every BUCKET_CHECK_S only: calls in between do nothing.
        Errors: OSError, ValueError, RuntimeError (store).
        """
        now, settings = time.monotonic(), project_config().store
        if now < self._not_before:
            return
        self._not_before = now + BUCKET_CHECK_S if settings.uri else now
        store = StorePlace(settings.uri or str(settings.path), settings.lease_ttl_s).open()
        live = {holder.token for holder in store.holders()}
        if self._live - live:
            # again after a lease's length: a run is over if no next step has begun by then
            self._due += [now, now + settings.lease_ttl_s + OVERDUE_CHECK_S]
        self._live = live
        waits = self._child is not None and self._child.poll() is None
        if not waits and any(due <= now for due in self._due):
            self._due = [due for due in self._due if due > now]
            self._child = subprocess.Popen([*OURS, "close-dead"], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the child process, if any, and wait for its end."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait()


def _close_dead() -> int:
    from agentgym.pipeline.table import open_store
    from agentgym.tracking.deliver import close_dead

    cfg = project_config()
    for run_id, reason in close_dead(cfg, open_store(cfg)).items():
        print(f"MLflow run {run_id} is closed: {reason}")
    return 0


class Service:
    """A child process that calls of `keep` restart when it ends, until it has ended too often."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: dict[str, str],
        bound: socket.socket | None = None,
    ) -> None:
        """Describe a service; `keep` starts it. bound: socket whose descriptor `command` names."""
        self.name, self._command, self.log, self._env, self._bound = name, command, log, env, bound
        self._stack = contextlib.ExitStack()
        self._starts: list[float] = []
        self._next_start = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.given_up = False

    def keep(self) -> bool:
        """Start the service if it is down and its pause is over; give it up after MAX_RESTARTS.
        The call that finds an ended process only cleans up; a later one starts it again.
        Result: True if anything changed.
        """
        if self.process is not None and self.process.poll() is None:
            return False
        now = time.monotonic()
        if self.process is not None:
            code = self.process.returncode
            logger.warning("%s ended with code %d; it is started again", self.name, code)
            self.close()
            self._next_start = now + min(2.0 ** len(self._starts), 60.0)
            return True
        if self.given_up or now < self._next_start:
            return False
        self._starts = [start for start in self._starts if now - start < RESTART_WINDOW_S]
        if len(self._starts) > MAX_RESTARTS:
            message, count = "%s died %d times within %g s; it stays down\n%s", len(self._starts)
            logger.error(message, self.name, count, RESTART_WINDOW_S, tail(self.log))
            self.given_up = True
            return True
        self._starts.append(now)
        descriptors = () if self._bound is None else (self._bound.fileno(),)
        self.process = self._stack.enter_context(
            owned_process(self._command, log_path=self.log, env=self._env, pass_fds=descriptors)
        )
        logger.info("%s is process %d", self.name, self.process.pid)
        return True

    def close(self) -> None:
        """End the process, if any; a later `keep` starts another."""
        self._stack.close()
        self.process = None


def server_environment(address: str, login: str) -> dict[str, str]:
    """Return variables for our Prefect server: login, allowed origin, fewer log lines.
    address: the server's, `http://host:port`. login: `user:password`.
    """
    return {
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address,
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }


def _parts(
    state: Path, me: Services, env: dict[str, str], sockets: Mapping[str, socket.socket]
) -> dict[str, Service]:
    """Return the services by name, not started yet. me: their addresses and login.
    env: of the Prefect server and its clients. sockets: by service, bound.
    """
    prefect_env = {
        **server_environment(me.prefect, me.login),
        "PREFECT_UI_STATIC_DIRECTORY": str((state / "prefect/ui").resolve()),
        "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS": "60",
    }
    python = (sys.executable, "-m")
    parts = {
        "prefect": ([*python, "services.prefect_server"], {**env, **prefect_env}),
        "mlflow": ([*python, "services.mlflow_server"], {mlflow_server.LOGIN: me.login}),
        "viewer": ([*OURS, "viewer"], {VIEWER_LOGIN: me.login}),
        "worker": ([*OURS, "worker"], env),
    }
    services = {}
    for name, (command, variables) in parts.items():
        if bound := sockets.get(name):
            command = [*command, str(bound.fileno())]
        services[name] = Service(name, command, log_file(state, name), variables, bound)
    return services


def _engine(state: Path) -> dict[str, Service]:
    """Return the service that keeps an engine between runs, by name, and link KEPT in the state
    folder to its new folder. If the project's parameters are invalid or their engine needs no
    service, return {} and only remove an old link.
    """
    link = state / KEPT
    link.unlink(missing_ok=True)
    try:
        cfg = project_config()
    except ConfigError as error:
        logger.warning("no engine is kept: %s", error)
        return {}
    if cfg.rollout.engine not in HOSTED:
        return {}
    folder = new_folder()
    link.symlink_to(folder)
    command, env = host_command(cfg, folder, cfg.vllm.keep_s), host_environment(cfg)
    return {"engine": Service("engine", command, log_file(state, "engine"), env)}


def supervise(state: Path, sockets: Mapping[str, socket.socket]) -> int:
    """Run the services and set Prefect up; at SIGTERM end them and return 0.
    state: folder of the logs and of the services' record. The record, and prefect.toml unless it
    is the user's own, are removed at the end.
    sockets: of `prefect`, `mlflow` and `viewer`, already bound.
    Errors: ConfigError without /proc, or as `set_up`; RuntimeError if a service does not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    started = process_start(os.getpid())
    if started is None:
        needs = "`make up` needs /proc to tell its processes from others"
        raise ConfigError(f"{needs}; use `prefect server start` here")
    addresses = {
        name: f"http://127.0.0.1:{bound.getsockname()[1]}" for name, bound in sockets.items()
    }
    prefect, mlflow, viewer = addresses["prefect"], addresses["mlflow"], addresses["viewer"]
    me = Services(os.getpid(), started, prefect, mlflow, new_login(), viewer=viewer)
    env = client_environment(me)
    services = _parts(state, me, env, sockets) | _engine(state)
    ready = False

    def publish() -> None:
        processes = ((name, service.process) for name, service in services.items())
        pids = {name: process.pid for name, process in processes if process is not None}
        given_up = tuple(name for name, service in services.items() if service.given_up)
        record = asdict(replace(me, ready=ready, pids=pids, given_up=given_up))
        write_private(state_file(state), json.dumps(record, indent=1).encode())

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        stack.callback(forget, state)
        for service in services.values():
            # the stack closes the last first: the worker ends while the server still listens
            stack.callback(service.close)
        try:
            pages = {
                "prefect": f"{me.api}/health",
                "mlflow": f"{me.mlflow}/health",
                "viewer": f"{me.viewer}/healthz",
            }
            for name in pages:
                services[name].keep()
            publish()
            for name, page in pages.items():
                wait_until_healthy(services[name], page)
            set_up(env)
            if toml_is_ours():
                write_private(TOML, _toml(state, me).encode())
            ready = True
            undertaker = Undertaker()
            stack.callback(undertaker.close)
            next_look = 0.0
            while True:
                # any(generator) would stop at the first change
                changed = [service.keep() for service in services.values()]
                if any(changed):
                    publish()
                if time.monotonic() >= next_look:
                    _look_after(me, undertaker)
                    next_look = time.monotonic() + OVERDUE_CHECK_S
                time.sleep(CHECK_S)
        except KeyboardInterrupt:
            logger.info("stopping")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


def _look_after(services: Services, undertaker: Undertaker) -> None:
    """Reschedule crashed flow runs and close dead runs in MLflow; errors are only logged."""
    looks = {
        "crashed flow runs": lambda: bring_back(services.api, services.login),
        "dead runs": undertaker.look,
    }
    for what, look in looks.items():
        try:
            look()
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("could not look for %s: %s", what, error)


def wait_until_healthy(service: Service, address: str) -> None:
    """Wait until the service answers at the address. Errors: RuntimeError with its log's end."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not healthy(address):
        if service.process is None or service.process.poll() is not None:
            raise RuntimeError(f"{service.name} ended while starting\n{tail(service.log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{service.name} did not come up within {START_TIMEOUT_S:g} s\n{tail(service.log)}"
            )
        time.sleep(POLL_S)
    logger.info("%s answers", service.name)


def _pools() -> int:
    from prefect.client.schemas.actions import WorkPoolCreate

    from services.recovery import install

    template = json.loads(JOB_TEMPLATE.read_bytes())
    install(
        WorkPoolCreate(name=POOL, type="process", concurrency_limit=POOL_LIMIT),
        WorkPoolCreate(name=KUBERNETES_POOL, type="kubernetes", base_job_template=template),
    )
    return 0


def _toml(state: Path, services: Services) -> str:
    """Return the text of prefect.toml. The login is in its address: no other server gets it."""
    home = state / "prefect"
    return f"""{TOML_MARK}: `prefect` commands typed here go to this project's server
home = {json.dumps(str(home))}
profiles_path = {json.dumps(str(home / "profiles.toml"))}
local_storage_path = {json.dumps(str(home / "storage"))}
ui_url = {json.dumps(services.prefect)}

[api]
url = {json.dumps(with_login(services.api, services.login))}
"""


def healthy(address: str) -> bool:
    """Return True if a server answers 200 at the address within 5 s."""
    try:
        with opened(address, 5) as reply:
            return bool(reply.status == 200)
    except OSError:  # urllib's errors too
        return False


def _worker() -> int:
    """Run a Prefect worker until its owner ends; its flow runs then crash and are rescheduled."""
    end_with_owner(WORKER_GRACE_S)
    sys.argv = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    sys.argv += ["--name", f"{socket.gethostname()}-{POOL}"]
    from prefect.cli import app

    app()
    return 0


def _viewer(descriptor: int) -> int:
    """Serve `agentgym view` behind our gate, on a bound socket, until SIGTERM or its owner ends."""
    from agentgym.viewer.app import make_app
    from agentgym.viewer.guard import LOOPBACK, Guard
    from agentgym.viewer.viewer import Viewer
    from services.proxy import Gate, serve

    bound = socket.socket(fileno=descriptor)
    with Viewer.open(project_config()) as viewer:
        guarded = Guard(make_app(viewer), LOOPBACK, bound.getsockname()[1])
        gate = Gate(guarded, os.environ.pop(VIEWER_LOGIN), open_paths=("/healthz",), sockets=False)
        serve(gate, bound)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run a command. arguments: its name, then descriptors of sockets. Result: an exit code."""
    command, *descriptors = arguments
    if command == "supervise":
        bound = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
        sockets = dict(zip(("prefect", "mlflow", "viewer"), bound, strict=True))
        return guarded(lambda: supervise(STATE, sockets), show_traceback=True)
    if command == "viewer":
        return _viewer(int(descriptors[0]))
    return {"pools": _pools, "close-dead": _close_dead, "worker": _worker}[command]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
