"""Fallback without our wrapper: one Java process for each game, through the engine's own interface
and py4j. It is slow and large, but correct.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from envs.sciworld.jvm import (
    EXIT_TIMEOUT_S,
    WRAPPER,
    GameFailed,
    JvmLost,
    find_engine,
    find_java,
    java_options,
)
from envs.sciworld.slots import CALL_TIMEOUT_S, Pool, SlotPool

logger = logging.getLogger(__name__)

HEAP_MIB = 160


def make_pool() -> Pool:
    """Return a SlotPool; with a warning a StockPool if WRAPPER is missing. No process starts yet.
    Errors: ValueError if Java or the engine is missing.
    """
    find_java()
    find_engine()
    if WRAPPER.exists():
        return SlotPool()
    logger.warning(
        "%s is missing: one Java process for each session, about 145 MiB; make it: python -m"
        " envs.sciworld.make_jar",
        WRAPPER,
    )
    return StockPool()


class StockPool:
    """A thread-safe pool that starts one process per game."""

    def __init__(self) -> None:
        self.restarts = 0
        self.engine_s = 0.0  # not measured
        self._slots: set[StockSlot] = set()
        self._gate = threading.Lock()

    @property
    def pids(self) -> list[int]:
        with self._gate:
            return [slot.process.pid for slot in self._slots]

    def warm(self, num_games: int) -> None:
        """Do nothing: a process ends with its game."""

    def acquire(self) -> StockSlot:
        slot = start()
        with self._gate:
            self._slots.add(slot)
        return slot

    def release(self, slot: Any) -> None:
        with self._gate:
            self._slots.discard(slot)
        slot.end()

    def close(self) -> None:
        with self._gate:
            slots, self._slots = self._slots, set()
        for slot in slots:
            slot.end()


@dataclass(eq=False, slots=True)
class StockSlot:
    process: subprocess.Popen[bytes]
    gateway: Any
    engine: Any

    def call(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation and return its texts, see `Place.call`.
        Errors: GameFailed; JvmLost, also if no answer came: if the process dies before it reads a
        call, py4j reports an error without a cause.
        """
        # imported here because the package is installed only with the engine
        from py4j.protocol import Py4JError, Py4JJavaError

        try:
            try:
                return self._carry_out(operation, texts)
            except Py4JJavaError as error:
                # str() calls the process, which may be dead
                raise GameFailed(str(error)) from error
        except (Py4JError, OSError) as error:
            raise JvmLost(f"{type(error).__name__} {error}") from error

    async def call_async(self, operation: str, *texts: str) -> list[str]:
        """Carry out an operation with a deadline, see `call`. After a timeout (JvmLost) the caller
        closes the game; that ends the process, and so the waiting thread.
        """
        try:
            return await asyncio.wait_for(
                asyncio.to_thread(self.call, operation, *texts), CALL_TIMEOUT_S
            )
        except TimeoutError:
            raise JvmLost(f"a game gave no answer within {CALL_TIMEOUT_S:g} s") from None

    def _carry_out(self, operation: str, texts: tuple[str, ...]) -> list[str]:
        engine = self.engine
        if operation == "l":
            complaint = engine.load(texts[0], int(texts[1]), "", False)
            if complaint:
                raise GameFailed(complaint)
            return [engine.getTaskDescription(), *self._step("look around")]
        if operation == "s":
            return self._step(texts[0])
        if operation == "a":
            return [self._text(getattr(engine, name)()) for name in texts]
        assert operation == "u", operation
        with TemporaryDirectory() as folder:
            engine.getObjectTree(folder)
            return [(Path(folder) / "objectTree.json").read_text(encoding="utf-8")]

    def _step(self, action: str) -> list[str]:
        text = self.engine.step(action)
        completed = "true" if self.engine.getCompleted() else "false"
        return [text, str(self.engine.getScore()), completed, str(self.engine.getNumMoves())]

    def _text(self, answer: Any) -> str:
        if isinstance(answer, str):
            return answer
        text = "\n".join(answer)
        self.gateway.detach(answer)
        return text

    def end(self) -> None:
        self.gateway.close()
        self.process.kill()
        self.process.wait(EXIT_TIMEOUT_S)


def start() -> StockSlot:
    """Start a Java process, which ends with this one, and return its game. Its gateway has a free
    loopback port and is protected by a token.
    Errors: Py4JError if it does not answer; it is killed then.
    """
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    port, token, process = launch_gateway(
        classpath=str(find_engine()),
        javaopts=java_options(HEAP_MIB),
        java_path=find_java(),
        cwd=str(find_engine().parent),
        die_on_exit=True,
        enable_auth=True,
        create_new_process_group=True,
        return_proc=True,
    )
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(
            port=port,
            auth_token=token,
            auto_field=True,
            auto_convert=True,
            read_timeout=CALL_TIMEOUT_S,
            # otherwise garbage collection would wait for the process of each unreleased game
            enable_memory_management=False,
        )
    )
    try:
        engine = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
    except BaseException:
        process.kill()
        raise
    return StockSlot(process, gateway, engine)
