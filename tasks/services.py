"""`make up` and `make down`: the Prefect server, a worker and MLflow of this project, under one supervisor.

The supervisor starts them, brings one that dies back, and ends them. They watch a pipe that only it holds, so none outlives it.
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from agentgym.cli import guarded
from agentgym.config import ConfigError
from agentgym.deploy.owned import end_with_owner, owned_process, tail
from agentgym.store.files import discard, write_temp
from agentgym.store.lease import process_start

logger = logging.getLogger(__name__)

STATE = Path(".agentgym")
TOML = Path("prefect.toml")  # Prefect reads it in the working directory
TOML_MARK = "# written by `make up`, removed by `make down`"
POOL, KUBERNETES_POOL = "local", "kubernetes"
JOB_TEMPLATE = Path("k8s/prefect/base-job-template.json")
POOL_LIMIT = 4  # flow runs of this machine at a time; each deployment has its own limit beside it
PORTS = {"prefect": 4200, "mlflow": 5000}  # taken where free

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.3
CHECK_S = 1.0  # between two looks at the services
MAX_RESTARTS, RESTART_WINDOW_S = 5, 600.0  # of one service
WORKER_GRACE_S = 8.0  # below what its owner waits


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
        services = Services(**json.loads(_state_file(state).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return services if process_start(services.pid) == services.started else None


def is_stale(state: Path) -> bool:
    """Does prefect.toml name the server of a supervisor that is gone."""
    return TOML.exists() and _toml_is_ours() and running(state) is None


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
                raise RuntimeError(f"the services did not start\n{tail(_log(state, 'supervisor'))}")
            time.sleep(POLL_S)
        _stop(state)
        raise RuntimeError(f"the services did not start within {START_TIMEOUT_S:g} s\n{tail(_log(state, 'supervisor'))}")


def down(state: Path) -> int:
    """End everything `up` started. Result: an exit code."""
    with _alone(state):
        services = running(state)
        if services is None:
            _forget(state)  # of a supervisor that was killed
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
    print(f"{'start':<9}{command if _toml_is_ours() else f'PREFECT_API_URL={services.api} {command}'}")
    return 0 if len(services.pids) == 3 else 1


def _start_supervisor(state: Path, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    log = _log(state, "supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.services", "supervise", *map(str, ports)],
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
                _forget(state)
                return
            time.sleep(POLL_S)
    raise RuntimeError(f"the supervisor, process {services.pid}, does not end")


class _Service:
    """One child of the supervisor and its restarts."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self.name, self._command, self._log, self._env = name, command, log, env
        self._stack = contextlib.ExitStack()
        self._starts: list[float] = []
        self._next_start = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.given_up = False

    def keep(self) -> bool:
        """Start it where it is not running and may be. Result: did anything change."""
        if self.process is not None and self.process.poll() is None:
            return False
        now = time.monotonic()
        if self.process is not None:
            logger.warning("%s ended with code %d", self.name, self.process.returncode)
            self.close()
            self._next_start = now + min(2.0 ** len(self._starts), 60.0)
            return True
        if self.given_up or now < self._next_start:
            return False
        self._starts = [start for start in self._starts if now - start < RESTART_WINDOW_S]
        if len(self._starts) > MAX_RESTARTS:
            logger.error("%s died %d times within %g s; it stays down\n%s", self.name, len(self._starts), RESTART_WINDOW_S, tail(self._log))
            self.given_up = True
            return True
        self._starts.append(now)
        self.process = self._stack.enter_context(owned_process(self._command, log_path=self._log, env=self._env))
        logger.info("%s is process %d", self.name, self.process.pid)
        return True

    def close(self) -> None:
        """End it."""
        self._stack.close()
        self.process = None


def supervise(state: Path, prefect_port: int, mlflow_port: int) -> int:
    """Run the services until SIGTERM. Result: an exit code."""
    started = process_start(os.getpid())
    if started is None:
        raise ConfigError("`make up` needs /proc to tell its processes from others; use `prefect server start` here")
    prefect, mlflow = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
    me = Services(os.getpid(), started, prefect, mlflow)
    own = [sys.executable, "-m", "tasks.services"]
    env = {
        "PWD": str(Path.cwd()),  # prefect.yaml's working directory
        "PREFECT_API_URL": me.api,
        "PREFECT_UI_STATIC_DIRECTORY": str((state / "prefect/ui").resolve()),
        "PREFECT_SERVER_UI_API_URL": me.api,
        "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS": "60",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes that nobody here uses, and that outlive the server
    }
    database = f"sqlite:///{(state / 'mlflow.db').resolve()}"
    artifacts = str((state / "mlflow-artifacts").resolve())
    mlflow_command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--artifacts-destination", artifacts]
    commands = {
        "prefect": [sys.executable, "-m", "tasks.prefect_server", str(prefect_port)],
        "mlflow": [*own, "keep", *mlflow_command, "--host", "127.0.0.1", "--port", str(mlflow_port), "--workers", "1"],
        "worker": [*own, "worker"],
    }
    services = {name: _Service(name, command, _log(state, name), env) for name, command in commands.items()}
    ready = False

    def publish() -> None:
        pids = {name: service.process.pid for name, service in services.items() if service.process is not None}
        given_up = tuple(name for name, service in services.items() if service.given_up)
        _write(_state_file(state), asdict(Services(me.pid, me.started, prefect, mlflow, ready, pids, given_up)))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        stack.callback(_forget, state)
        for service in services.values():
            stack.callback(service.close)  # in the end: the worker first, while the server still listens
        try:
            services["prefect"].keep()
            services["mlflow"].keep()
            publish()
            for name, address in (("prefect", f"{me.api}/health"), ("mlflow", f"{mlflow}/health")):
                _wait_until_healthy(services[name], address, _log(state, name))
            _set_up(env)
            if _toml_is_ours():
                TOML.write_text(_toml(state, me.api))
            ready = True
            while True:
                changed = [service.keep() for service in services.values()]  # each of them, so no any() over a generator
                if any(changed):
                    publish()
                time.sleep(CHECK_S)
        except KeyboardInterrupt:
            logger.info("stopping")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


def _wait_until_healthy(service: _Service, address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not healthy(address):
        if service.process is None or service.process.poll() is not None:
            raise RuntimeError(f"{service.name} ended while starting\n{tail(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{service.name} did not come up within {START_TIMEOUT_S:g} s\n{tail(log)}")
        time.sleep(POLL_S)


def _set_up(env: dict[str, str]) -> None:
    """Pools, automations and deployments, as the files of this project say. In children: Prefect's client would stay in memory."""
    image = {"AGENTGYM_IMAGE": os.environ.get("AGENTGYM_IMAGE", "agentgym:latest")}
    for command in (["tasks.services", "pools"], ["prefect", "--no-prompt", "deploy", "--all"]):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, **image, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"`python -m {' '.join(command)}` failed ({done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}")


def _pools() -> int:
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from tasks.recovery import apply_automations, automations

    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=POOL_LIMIT), overwrite=True)
        template = json.loads(JOB_TEMPLATE.read_bytes())
        client.create_work_pool(WorkPoolCreate(name=KUBERNETES_POOL, type="kubernetes", base_job_template=template), overwrite=True)
    apply_automations(automations())
    return 0


def _toml(state: Path, api: str) -> str:
    home = state / "prefect"
    return f"""{TOML_MARK}: `prefect` commands typed here go to this project's server
home = {json.dumps(str(home))}
profiles_path = {json.dumps(str(home / "profiles.toml"))}
local_storage_path = {json.dumps(str(home / "storage"))}

[api]
url = {json.dumps(api)}
"""


def _toml_is_ours() -> bool:
    return not TOML.exists() or TOML.read_text().startswith(TOML_MARK)


def _forget(state: Path) -> None:
    _state_file(state).unlink(missing_ok=True)
    if _toml_is_ours():
        TOML.unlink(missing_ok=True)


def _write(path: Path, content: object) -> None:
    """Readers see the old content or the new, never a part."""
    temporary = write_temp(path.parent, json.dumps(content, indent=1).encode())
    try:
        temporary.replace(path)
    finally:
        discard(temporary)


def _state_file(state: Path) -> Path:
    return state / "services.json"


def _log(state: Path, name: str) -> Path:
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


def healthy(address: str) -> bool:
    """Does a server answer there, within 5 s."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[IO[bytes]]:
    """One `make up` or `make down` at a time; it ends with its holder."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "services.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _worker() -> int:
    """A Prefect worker that ends with its owner, its flow runs with it: they report themselves as crashed and are run again."""
    end_with_owner(WORKER_GRACE_S)
    sys.argv = ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", f"{socket.gethostname()}-{POOL}"]
    from prefect.cli import app

    app()
    return 0


def _keep(command: Sequence[str]) -> int:
    """Run a command that knows nothing of owners, and end it with ours."""
    process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    end_with_owner()
    return process.wait()


def main(argv: list[str] | None = None) -> int:
    """Exit codes as everywhere; see `agentgym.cli.main`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    internal: dict[str, Callable[[], int]] = {
        "supervise": lambda: supervise(STATE, int(arguments[1]), int(arguments[2])),
        "pools": _pools,
        "worker": _worker,
        "keep": lambda: _keep(arguments[1:]),
    }
    if arguments and arguments[0] in internal:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        return internal[arguments[0]]() if arguments[0] != "supervise" else guarded(internal["supervise"], show_traceback=True)
    parser = argparse.ArgumentParser(prog="python -m tasks.services", description="The servers of this project.")
    commands = parser.add_subparsers(required=True, metavar="up | down | status")
    start = commands.add_parser("up", help="start a Prefect server, a worker and MLflow; harmless where they run")
    start.add_argument("--prefect-port", type=int)
    start.add_argument("--mlflow-port", type=int)
    start.set_defaults(run=lambda chosen: up(STATE, chosen.prefect_port, chosen.mlflow_port))
    commands.add_parser("down", help="end them").set_defaults(run=lambda _: down(STATE))
    commands.add_parser("status", help="say what runs").set_defaults(run=lambda _: status(STATE))
    parsed = parser.parse_args(arguments)
    return guarded(lambda: int(parsed.run(parsed)))


if __name__ == "__main__":
    sys.exit(main())
