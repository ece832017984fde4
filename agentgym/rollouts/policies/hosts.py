"""The processes that hold engines: who starts one, who finds it, and that it ends with its owner.

A run has one, started by the first step that asks. It is a child with a pipe of its owner: not
PR_SET_PDEATHSIG, which fires when the thread that started it ends, and Prefect's threads do.
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
from agentgym.rollouts.policies.wire import (
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

if TYPE_CHECKING:  # a step that is done is spared torch
    from agentgym.rollouts.policies.opening import EngineSettings

logger = logging.getLogger(__name__)

ADDRESS = "AGENTGYM_ENGINE_HOST"  # variable with the folder of an engine that child processes use
QUEUE_S = 10.0  # for the session before to leave an engine of the same process
POLL_S = 0.05
PREFIX, SWEEP_S = "agentgym-engine-", 60.0  # a younger folder may not be in use yet
DOOR_S = 30.0
ROOT = Path(__file__).parents[3]


@dataclass
class Connection:
    """A session that begins: one call at a time, before an event loop takes the socket over."""

    socket: socket.socket
    folder: Path  # the host's
    lost: Callable[[], str]  # what became of the host, for people

    def ask(self, do: str, *given: Any, limit_s: float) -> Any:
        """Errors: HostLost; what the call raises."""
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
    """Enter the host that listens in a folder.

    python: its interpreter, for people. Errors: HostLost; ConfigError if it is of other code.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(DOOR_S)
        with address_in(folder) as address:
            connection.connect(address)
        mine, theirs = door(), receive(connection)
        connection.sendall(frame(mine))
    except OSError as error:
        connection.close()
        raise HostLost(f"{lost()} ({error})") from None
    if odd := mismatch(mine, theirs):
        connection.close()
        raise ConfigError(
            f"the engine's host, run by {python}, is of other code than this ({odd}); let"
            " rollout.engine_python name an interpreter that has this checkout installed"
        )
    packages = " ".join(f"{name} {each}" for name, each in theirs["packages"].items())
    logger.info("engine host: Python %s, %s", theirs["python"], packages)
    return Connection(connection, folder, lost)


class OwnHost:
    """A host that this process starts when it is first asked for, and starts again if it died."""

    def __init__(self, cfg: RunConfig) -> None:
        """cfg: of the run, whose largest engine it has to be."""
        self._cfg = cfg
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self.folder = Path()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connect(self, cfg: RunConfig) -> Connection:
        """Errors: HostLost with the end of its log, if it does not start."""
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
        """The settings with the largest sizes that a step of the run needs."""
        cfg = self._cfg
        return replace(
            settings,
            num_slots=max(settings.num_slots, cfg.rollout.concurrency),
            context_tokens=max(settings.context_tokens, cfg.model.context_tokens),
        )

    def close(self) -> None:
        """End it, and wait for that; bounded, see `owned_process`."""
        with self._guard:
            self._stack.close()
            self._process = None

    def _start(self, cfg: RunConfig) -> None:
        stack, log_path = contextlib.ExitStack(), _log_path(cfg)
        with stack:
            _sweep()
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.enter_context(address_in(self.folder))  # nobody sweeps it
            entry, python = engine_entry(cfg.rollout.engine), engine_python(cfg)
            process = stack.enter_context(
                owned_process(
                    [python, "-m", "agentgym.rollouts.policies.host", str(self.folder), entry],
                    log_path=log_path,
                    env=_environment(python),
                )
            )
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


def _sweep() -> None:
    """Remove folders whose owner and host were both killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < SWEEP_S:
                continue
            with only_user(folder):
                shutil.rmtree(folder)


def _log_path(cfg: RunConfig) -> Path:
    return cfg.state_dir / "logs" / "engine.log"


def _environment(python: str) -> dict[str, str]:
    """What the host is told: this checkout, if it is one, and the programs beside its Python."""
    told = {"PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])}
    if (ROOT / "pyproject.toml").is_file():
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        told["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return told


_own: OwnHost | None = None  # of the innermost `one_engine`
_guard = threading.Lock()


@contextlib.contextmanager
def one_engine(cfg: RunConfig) -> Iterator[None]:
    """Engines that are opened inside are one: the first starts it, it ends with the block.

    In a block that is inside another, the outer one's. Processes that are started inside find it.
    """
    global _own
    with _guard:
        mine = None if _own is not None else OwnHost(cfg)
        _own = _own or mine
    if mine is None:
        yield
        return
    before = os.environ.get(ADDRESS)
    try:
        yield
    finally:
        with _guard:
            _own = None
        if before is None:
            os.environ.pop(ADDRESS, None)
        else:
            os.environ[ADDRESS] = before
        mine.close()


@dataclass
class Taken:
    """An engine whose turn a session has."""

    connection: Connection
    needs: str  # as of `Session.begin`
    enlarged: Callable[[EngineSettings], EngineSettings]
    close: Callable[[], None]  # ends a host that was started for this session alone


def take(cfg: RunConfig, begin: Callable[[Connection, float], str]) -> Taken:
    """Begin a session with the run's engine, or with one that the process above lends, or else with
    one for this session alone.

    begin: asks a connection for its turn, with the seconds to wait for it; raises HostBusy.
    Errors: HostLost; ConfigError.
    """
    own = _own
    if own is None or not own.is_alive:
        for folder in _lent(cfg):
            with contextlib.suppress(HostLost, HostBusy, ConfigError):
                lost = f"the engine's host in {folder} is lost"
                connection = connect(folder, lambda lost=lost: lost, "another process")  # type: ignore[misc]
                return Taken(connection, begin(connection, 0.0), _as_asked, _nothing)
    if own is not None:
        connection = own.connect(cfg)
        os.environ[ADDRESS] = str(own.folder)
        try:
            return Taken(connection, begin(connection, QUEUE_S), own.enlarged, _nothing)
        except HostBusy as error:
            logger.warning("%s: another one is started", error)
    alone = OwnHost(cfg)
    try:
        connection = alone.connect(cfg)
        return Taken(connection, begin(connection, QUEUE_S), _as_asked, alone.close)
    except BaseException:
        alone.close()
        raise


def _lent(cfg: RunConfig) -> list[Path]:
    """Folders of hosts that other processes own: the one above, and the one that is kept."""
    named = os.environ.get(ADDRESS)
    folders = [*([Path(named)] if named else []), cfg.state_dir / KEPT]
    return [folder for folder in folders if (folder / SOCKET).exists()]


KEPT = "engine"  # folder of a kept host in the state folder


def _as_asked(settings: EngineSettings) -> EngineSettings:
    return settings


def _nothing() -> None: ...
