"""An engine in a process of its own, for the steps of a run one after the other.

Started by its owner as `python -m agentgym.rollouts.policies.host FOLDER MODULE:CLASS KEEP_S`, it
listens on a socket in a folder that only its user can enter, holds one engine, and ends when the
owner does, even if that is killed. KEEP_S: seconds after which it ends an unused engine; 0: never.
Each connection is a session of the host; one session at a time uses the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from agentgym.deploy.owned import end_with_owner
from agentgym.models.transport import FromProcess
from agentgym.rollouts.policies.engine_settings import EngineSettings
from agentgym.rollouts.policies.host_protocol import (
    SOCKET,
    HostBusy,
    Outbox,
    address_in,
    door,
    frame,
    mismatch,
    read,
    sent_error,
)
from agentgym.types import SampleKey, Sampling

if TYPE_CHECKING:
    from agentgym.rollouts.policies.vllm import VllmPolicy

logger = logging.getLogger(__name__)

# JSON has lists in place of tuples
SETTINGS, DELIVERY = TypeAdapter(EngineSettings), TypeAdapter(FromProcess)
DOOR_S = 30.0  # for a client to send its versions
WHOLE_END_S = 2.0  # for an engine to end in order; shorter than the owner's wait


class Host:
    """One engine, and the queue of the sessions that use it."""

    def __init__(self, kind: type[VllmPolicy], keep_s: float = 0.0) -> None:
        """Prepare a host without an engine. kind: the engine's class; for example `VllmPolicy`.
        keep_s: seconds after which an unused engine is ended; 0: never.
        """
        self.kind, self._keep_s = kind, keep_s
        self.engine: VllmPolicy | None = None
        self.settings: EngineSettings | None = None
        self.turn = asyncio.Lock()
        self.user = ""  # the session that has the engine
        self.ending: asyncio.Task[None] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end; close it at once if the client has another protocol or
        other source code. Errors of the connection are only logged.
        """
        session = Session(self, writer)
        try:
            here = door()
            writer.write(frame(here))
            async with asyncio.timeout(DOOR_S):
                there = await read(reader)
            if mismatch(here, there, "protocol", "source"):
                return  # the client raises the error
            while True:
                for call in await read(reader):
                    session.take(call)
        except (ConnectionError, TimeoutError) as error:
            logger.info("session of %s ends: %s", session.name, error)
        finally:
            await session.end()
            writer.close()

    async def start(self, settings: EngineSettings, folder: Path) -> None:
        """Start an engine in place of the present one."""
        await self.drop()
        self.engine = await asyncio.to_thread(self.kind.start, settings, folder)
        self.settings = settings

    async def unused(self) -> None:
        """End the engine after `keep_s`, if that is not 0; a session that begins cancels this."""
        if self._keep_s:
            await asyncio.sleep(self._keep_s)
            await self.drop()

    async def drop(self) -> None:
        """End the engine, if there is one."""
        engine, self.engine, self.settings = self.engine, None, None
        if engine is not None:
            await engine.close()


class Session:
    """One client's connection; each name in CALLS is a method that the client may call."""

    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self._host, self._out = host, Outbox(writer)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._has_turn = self._failed = False
        self._digest, self._version = "", 0  # of its first weights
        credentials = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.name = f"process {struct.unpack('3i', credentials)[0]}"  # at the other end

    def take(self, call: dict[str, Any]) -> None:
        """Start a call {"id", "do", "given"} as a task; cancel a running one for {"cancel": id}."""
        if "cancel" in call:
            if task := self._running.get(call["cancel"]):
                task.cancel()
            return
        task = asyncio.create_task(self._answer(**call))
        self._running[call["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(call["id"], None))

    async def end(self) -> None:
        """Cancel the running calls and leave the engine to the next session, asleep; end an engine
        that failed, or fails now. Its error is only logged.
        """
        for task in [*self._running.values()]:
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._starting is not None:  # it continues in its thread
            await asyncio.wait([self._starting])
        if not self._has_turn:
            return
        host = self._host
        try:
            if self._failed:
                raise RuntimeError("it failed")
            if host.engine is not None and host.settings is not None:
                async with asyncio.timeout(host.settings.publish_timeout_s):
                    await host.engine.sleep()
        except Exception as error:  # an engine that fails is not handed on
            logger.warning("the engine is ended: %s", error or type(error).__name__)
            with contextlib.suppress(Exception):
                await host.drop()
        finally:
            self._has_turn, host.user = False, ""
            host.turn.release()
            host.ending = asyncio.create_task(host.unused())

    async def _answer(self, id: int, do: str, given: list[Any]) -> None:
        try:
            if do not in CALLS:
                raise ValueError(f"an engine's host has no call {do!r}")
            if do not in ("begin", "ping") and not self._has_turn:
                raise RuntimeError(f"{do} of a session that has not begun")
            self._out.put({"id": id, "done": await getattr(self, do)(*given)})
        except Exception as error:
            kind, text = sent_error(error)
            self._failed |= do != "begin" and not kind  # errors with a kind leave it usable
            self._out.put({"id": id, "error": [kind, text]})

    @property
    def _engine(self) -> VllmPolicy:
        if self._host.engine is None:
            raise RuntimeError("the engine has not started")
        return self._host.engine

    async def ping(self) -> None:
        """Prove that the host answers."""

    async def begin(
        self, settings: dict[str, Any], digest: str, version: int, wait_s: float
    ) -> str:
        """Take the engine once the session before leaves; end an engine that fails or that these
        settings do not fit.
        digest, version: of the weights; an empty digest stands for a new adapter.
        Result: the client's next call: "model" for `start`, "weights" for `first`, or "" for none,
        because the engine has these weights. Errors: HostBusy after `wait_s` seconds.
        """
        host = self._host
        try:
            async with asyncio.timeout(wait_s):
                await host.turn.acquire()
        except TimeoutError:
            raise HostBusy(f"the engine is used by {host.user}") from None
        self._has_turn, host.user = True, self.name
        if host.ending is not None:
            host.ending.cancel()
            await asyncio.wait([host.ending])
        self._digest, self._version = digest, version
        wanted = SETTINGS.validate_python(settings)
        if host.engine is None or host.settings is None or not host.settings.serves(wanted):
            await host.drop()
            return "model"
        try:
            return await self._begun()
        except RuntimeError as error:
            logger.warning("another engine is started: %s", error)
            await host.drop()
            return "model"

    async def _begun(self) -> str:
        await self._engine.wake()
        if self._digest and self._engine.digest != self._digest:
            return "weights"
        await self._engine.begin(self._digest, self._version, None)
        return ""

    async def start(self, settings: dict[str, Any], folder: str) -> str:
        """Start an engine from a folder of `write_model`. Result: see `begin`."""
        wanted = SETTINGS.validate_python(settings)
        self._starting = asyncio.create_task(self._host.start(wanted, Path(folder)))
        await asyncio.shield(self._starting)
        return await self._begun()

    async def first(self, delivery: dict[str, Any]) -> None:
        """Begin the session with these weights. Errors: those of `Policy.publish`."""
        sent = DELIVERY.validate_python(delivery)
        await self._engine.begin(sent.digest, sent.version, sent)

    async def publish(self, delivery: dict[str, Any]) -> None:
        await self._engine.publish(DELIVERY.validate_python(delivery))

    async def generate(self, prompt_ids: list[int], sampling: list[Any]) -> list[Any]:
        """Sample one action. sampling: the fields of a `Sampling`, its key as a list.
        Result: the fields of a `Completion`.
        """
        key, *draw = sampling
        completion = await self._engine.generate(prompt_ids, Sampling(SampleKey(*key), *draw))
        return [completion.ids, completion.logprobs, completion.stop_reason, completion.version]

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return [scores.tolist() for scores in await self._engine.score(sequences)]

    async def usage(self) -> dict[str, Any]:
        usage = asdict(await self._engine.usage())
        return {**usage, "depth_s": sorted(usage["depth_s"].items())}  # JSON's keys are text

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()


CALLS = frozenset(
    {"ping", "begin", "start", "first", "publish", "generate", "score", "usage", "sleep", "wake"}
)


async def _run(folder: Path, host: Host) -> None:
    """Serve on a socket in the folder until SIGTERM; then remove the folder and end the engine."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with address_in(folder) as address, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")  # a client finds it once it listens
        listening.listen()
        (folder / f"{SOCKET}.new").rename(folder / SOCKET)
        server = await asyncio.start_unix_server(host.serve, sock=listening)
        await ended.wait()
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(host.drop(), WHOLE_END_S)


def main(arguments: Sequence[str]) -> int:
    """Run a host until SIGTERM or the end of its owner; return 0. arguments: see the module."""
    end_with_owner()
    folder, (kind, keep_s) = Path(arguments[0]), arguments[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    module, _, name = kind.partition(":")
    engine = getattr(importlib.import_module(module), name)
    folder.mkdir(mode=0o700, exist_ok=True)  # the host before this one may have removed it
    for old in folder.glob(f"{SOCKET}*"):
        old.unlink()
    asyncio.run(_run(folder, Host(engine, float(keep_s))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
