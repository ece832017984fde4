"""Start, find and end hosts, the processes that contain an engine.

A run has one, started by the first step that needs it. It is a child that reads a pipe of its
owner and ends with it. PR_SET_PDEATHSIG would not do: it fires when the thread that started the
child ends, and Prefect's threads end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.owned import owned_process, tail
from agentgym.rollouts.policies.engines import engine_entry, engine_python
from agentgym.rollouts.policies.host_protocol import (
    SOCKET,
    HostBusy,
    HostLost,
    address_in,
    door,
    frame,
    mismatch,
    only_user,
    raised,
    receive,
)

if TYPE_CHECKING:  # done steps load no torch, but keys include the source of these imports
    from agentgym.rollouts.policies import host as host
    from agentgym.rollouts.policies.engine_settings import EngineSettings

logger = logging.getLogger(__name__)

ADDRESS = "AGENTGYM_ENGINE_HOST"  # variable with the folder of an engine that child processes use
KEPT = "engine"  # in the state folder: a link to the folder of the host that `make up` keeps
QUEUE_S = 10.0  # limit of the wait until the session before has left this process's host
POLL_S = 0.05
PREFIX, SWEEP_S = "agentgym-engine-", 60.0  # a younger folder may not be in use yet
DOOR_S = 30.0
ROOT = Path(__file__).parents[3]


@dataclass
class Connection:
    """A socket to a host, for one call at a time, before an event loop takes it over."""

    socket: socket.socket
    folder: Path  # the host's
    lost: Callable[[], str]  # text of the error if the host is gone

    def ask(self, do: str, *given: Any, limit_s: float) -> Any:
        """Call the method `do` of the host's `Session` and return its result, within `limit_s`.
        Errors: HostLost; the method's own.
        """
        self.socket.settimeout(limit_s)
        try:
            self.socket.sendall(frame([{"id": 0, "do": do, "given": given}]))
            (answer,) = receive(self.socket)
        except TimeoutError:
            raise HostLost(f"the engine's host gave no answer to {do} in {limit_s:g} s") from None
        except OSError as error:
            raise HostLost(f"{self.lost()} ({error})") from None
        if "error" in answer:
            raise raised(answer["error"])
        return answer["done"]


def connect(folder: Path, lost: Callable[[], str], python: str) -> Connection:
    """Connect to the host that listens in a folder.
    lost: returns the error's text if the host is gone. python: the interpreter it has to run in.
    Errors: HostLost; ConfigError if it has other versions than this process or that interpreter.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(DOOR_S)
        with address_in(folder) as address:
            connection.connect(address)
        here, there = door(python), receive(connection)
        connection.sendall(frame(here))
    except OSError as error:
        connection.close()
        raise HostLost(f"{lost()} ({error})") from None
    if difference := mismatch(here, there, "protocol", "source", "packages"):
        connection.close()
        raise ConfigError(
            f"the engine's host does not fit this process: {difference}; let rollout.engine_python"
            " name an interpreter that has this checkout installed, and run `make down` and `make"
            " up` if that keeps an engine"
        )
    return Connection(connection, folder, lost)


class OwnHost:
    """A host that this process starts when it is first needed, and again if it died."""

    def __init__(self, cfg: RunConfig) -> None:
        """Prepare a host, not started yet. cfg: the run's, see `enlarged`."""
        self._cfg, self._stack, self._guard = cfg, contextlib.ExitStack(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connect(self, cfg: RunConfig) -> Connection:
        """Start the host if it is not alive, and connect.
        Errors: HostLost, with the end of its log if it does not start; ConfigError.
        """
        with self._guard:
            if not self.is_alive:
                self._stack.close()
                self._start(cfg)
            process, log_path = self._process, _log_path(cfg)
        assert process is not None

        def lost() -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            return (
                f"the engine's host (process {process.pid}) is lost, exit code"
                f" {process.returncode}; its log is {log_path}"
            )

        return connect(self.folder, lost, engine_python(cfg))

    def enlarged(self, settings: EngineSettings) -> EngineSettings:
        """Return the settings with at least the num_slots and context_tokens that the run needs."""
        num_slots = max(settings.num_slots, self._cfg.rollout.concurrency)
        context_tokens = max(settings.context_tokens, self._cfg.model.context_tokens)
        return replace(settings, num_slots=num_slots, context_tokens=context_tokens)

    def close(self) -> None:
        """End the host, if it runs, and wait for it as long as `owned_process` allows."""
        with self._guard:
            self._stack.close()
            self._process = None

    def _start(self, cfg: RunConfig) -> None:
        stack, log_path = contextlib.ExitStack(), _log_path(cfg)
        with stack:
            self.folder = new_folder()
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.enter_context(address_in(self.folder))  # keeps the folder from being swept
            command, variables = host_command(cfg, self.folder), host_environment(cfg)
            process = stack.enter_context(owned_process(command, log_path=log_path, env=variables))
            deadline = time.monotonic() + cfg.vllm.start_timeout_s
            while not (self.folder / SOCKET).exists():
                if process.poll() is not None:
                    raise HostLost(f"the engine's host did not start\n{tail(log_path)}")
                if time.monotonic() > deadline:
                    raise HostLost(
                        f"the engine's host did not listen within vllm.start_timeout_s"
                        f" {cfg.vllm.start_timeout_s:g}\n{tail(log_path)}"
                    )
                time.sleep(POLL_S)
            self._process, self._stack = process, stack.pop_all()


def new_folder() -> Path:
    """Make a folder with a short path for a host and return it; only its user can enter it.
    Also remove the folders of hosts that were killed together with their owner.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime >= SWEEP_S:
                with only_user(folder):
                    shutil.rmtree(folder)
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def _log_path(cfg: RunConfig) -> Path:
    return cfg.state_dir / "logs" / "engine.log"


def host_command(cfg: RunConfig, folder: Path, keep_s: float = 0.0) -> list[str]:
    """Command that starts a host, which ends an unused engine after keep_s seconds; 0: never."""
    program = [engine_python(cfg), "-m", "agentgym.rollouts.policies.host"]
    return [*program, str(folder), engine_entry(cfg.rollout.engine).value, f"{keep_s:g}"]


def host_environment(cfg: RunConfig) -> dict[str, str]:
    """Environment variables of a host: PATH with its interpreter's folder, PYTHONPATH with this
    checkout, if it is one.
    """
    programs = str(Path(engine_python(cfg)).parent)
    variables = {"PATH": os.pathsep.join([programs, os.environ.get("PATH", "")])}
    if (ROOT / "pyproject.toml").is_file():
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


_own: OwnHost | None = None  # of the outermost `one_engine`
_guard = threading.Lock()


@contextlib.contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """Restore these environment variables after the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def one_engine(cfg: RunConfig) -> Iterator[None]:
    """Share one engine inside the block: the first use starts it, the end of the block ends it. A
    block inside another shares the outer one's. Child processes find it, too.
    """
    global _own
    with _guard:
        new = None if _own is not None else OwnHost(cfg)
        _own = _own or new
    if new is None:
        yield
        return
    try:
        with variables_kept(ADDRESS):
            yield
    finally:
        with _guard:
            _own = None
        new.close()


@dataclass
class Taken:
    """A session that began, with what is needed to give it an engine and to end it."""

    connection: Connection
    needs: str  # result of `Session.begin`
    # of a run's host: settings -> settings with the sizes that later steps need, too
    enlarged: Callable[[EngineSettings], EngineSettings] = lambda settings: settings
    close: Callable[[], None] = lambda: None  # ends a host started for this session alone


def take(cfg: RunConfig, begin: Callable[[Connection, float], str]) -> Taken:
    """Begin a session with the first engine that accepts it, and return it. The order: the one of
    `one_engine` if it runs; else those of the parent process and of `make up`, then that of
    `one_engine`, started now; at last a new one for this session alone. Refusals are only logged.
    The variable ADDRESS then names the folder of the one of `one_engine` to child processes.
    begin: called with a connection and the seconds to wait for its engine; see `Session.begin`.
    Errors: HostLost; ConfigError; those of `begin`.
    """
    python = engine_python(cfg)

    def taken(connection: Connection, wait_s: float, **on_host: Any) -> Taken:
        try:
            return Taken(connection, begin(connection, wait_s), **on_host)
        except BaseException:
            connection.socket.close()
            raise

    shared = _own
    if shared is None or not shared.is_alive:
        # hosts that other processes own: the parent's, and the one that `make up` keeps
        folders = [*map(Path, filter(None, [os.environ.get(ADDRESS)])), cfg.state_dir / KEPT]
        for folder in folders:
            if not (folder / SOCKET).exists():
                continue
            try:
                connection = connect(folder, lambda: "the lent engine's host is lost", python)
                return taken(connection, 0.0)
            except (HostLost, HostBusy, ConfigError) as error:
                logger.info("another engine is started: %s", error)
    if shared is not None:
        connection = shared.connect(cfg)
        os.environ[ADDRESS] = str(shared.folder)
        try:
            return taken(connection, QUEUE_S, enlarged=shared.enlarged)
        except HostBusy as error:
            logger.warning("another engine is started: %s", error)
    alone = OwnHost(cfg)
    try:
        return taken(alone.connect(cfg), QUEUE_S, close=alone.close)
    except BaseException:
        alone.close()
        raise
