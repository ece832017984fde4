"""A policy whose engine lives in another process: a step's session with its run's engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentgym.config import RunConfig
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.transport import FromProcess, HandOver, memory_file, weights_digest
from agentgym.rollouts.policies.engine_settings import (
    EngineSettings,
    first_digest,
    first_weights,
    settings_of,
    write_model,
)
from agentgym.rollouts.policies.host_protocol import HostLost, Outbox, raised, read
from agentgym.rollouts.policies.hosts import Connection, Taken, take
from agentgym.types import Completion, Delivery, EngineUsage, Sampling

logger = logging.getLogger(__name__)

SLACK_S = 30.0  # added to the host's own time limit for its engine


class HostPolicy:
    """Policy with an engine in another process, its host, for one session."""

    def __init__(self, taken: Taken, settings: EngineSettings, version: int) -> None:
        """Wrap a session that `take` has begun. version: number of the engine's weights."""
        self._connection, self._release = taken.connection, taken.close
        self._context, self._limit_s = settings.context_tokens, settings.publish_timeout_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._out: Outbox | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._attaching = asyncio.Lock()
        self._failure: RuntimeError | None = None
        self._handing = HandOver()
        self.version = version

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one action, see `Policy.generate`."""
        sampling.require_room(prompt_ids, self._context)
        key, *draw = sampling
        ids, logprobs, *rest = await self._call("generate", prompt_ids, [list(key), *draw])
        return Completion(tuple(ids), tuple(logprobs), *rest)

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Score token sequences, see `Policy.score`."""
        scores = await self._call("score", sequences)
        return [torch.tensor(row, dtype=torch.float32) for row in scores]

    async def publish(self, delivery: Delivery) -> None:
        """Send weights to the engine. Errors: those of `Policy.publish`; TransportBroken."""
        await self._handing.send(delivery, lambda sent: self._call("publish", asdict(sent)))
        self.version = delivery.version

    async def usage(self) -> EngineUsage:
        """Return the usage since the session began."""
        usage = await self._call("usage")
        return EngineUsage(**{**usage, "depth_s": dict(usage["depth_s"])})

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def close(self) -> None:
        """Fail waiting calls; leave the engine to the next session, or end it if it was started for
        this one alone.
        """
        self._fail(RuntimeError("the engine was closed"))
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is None:
            self._connection.socket.close()
        else:
            self._writer.close()
        await asyncio.to_thread(self._release)

    async def _call(self, do: str, *given: Any) -> Any:
        """Call the method `do` of `host.Session` with these arguments and return its result.
        Errors: HostLost; RuntimeError once closed; those of the method.
        """
        if self._out is None and self._failure is None:
            await self._attach()
        if self._failure is not None:
            raise self._failure
        assert self._out is not None
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._out.put({"id": number, "do": do, "given": given})
            return await answer
        except asyncio.CancelledError:
            self._out.put({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def _attach(self) -> None:
        """Hand the socket to this event loop, once, and start to read answers."""
        async with self._attaching:
            if self._out is None:
                self._connection.socket.setblocking(False)
                reader, self._writer = await asyncio.open_unix_connection(
                    sock=self._connection.socket
                )
                self._out = Outbox(self._writer)
                self._reading = asyncio.create_task(self._read(reader, self._out))

    async def _read(self, reader: asyncio.StreamReader, out: Outbox) -> None:
        """Resolve calls as answers arrive; fail them all if the host is lost or ignores a ping."""
        coming, is_asked = asyncio.create_task(read(reader)), False
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=self._limit_s / 2)
                if not done:
                    if is_asked:
                        limit = f"{self._limit_s:g} s"
                        raise HostLost(f"the engine's host gave no sign of life within {limit}")
                    out.put({"id": 0, "do": "ping", "given": []})
                    is_asked = True
                    continue
                for answer in coming.result():
                    self._take(answer)
                coming, is_asked = asyncio.create_task(read(reader)), False
        except ConnectionError:
            self._fail(HostLost(await asyncio.to_thread(self._connection.lost)))
        except HostLost as error:
            self._fail(error)
        finally:
            coming.cancel()
            self._fail(RuntimeError("the engine was closed"))  # no later answer is read

    def _take(self, answer: dict[str, Any]) -> None:
        waiting = self._waiting.get(answer["id"])
        if waiting is None or waiting.done():  # a ping, or its call was cancelled
            return
        if "error" in answer:
            waiting.set_exception(raised(answer["error"]))
        else:
            waiting.set_result(answer["done"])

    def _fail(self, failure: RuntimeError) -> None:
        """Fail every waiting and every later call with this error, or with an earlier one."""
        self._failure = self._failure or failure
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._failure)


def open_on_host(
    cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int
) -> HostPolicy:
    """Begin a session with the run's engine, started if necessary, with the checkpoint's weights;
    return the policy. num_slots: episodes at a time. version: number of the weights from here on.
    Errors: HostLost; RuntimeError with the engine's error if it does not start; ConfigError;
    EngineMismatch if other weights arrived.
    """
    settings, digest = settings_of(cfg, checkpoint, num_slots), first_digest(checkpoint)
    patience = settings.publish_timeout_s * 2 + SLACK_S

    def begin(connection: Connection, wait_s: float) -> Any:
        limit_s = wait_s + patience
        return connection.ask("begin", asdict(settings), digest, version, wait_s, limit_s=limit_s)

    taken = take(cfg, begin)
    connection, needs = taken.connection, taken.needs
    try:
        if needs == "model":
            folder = Path(tempfile.mkdtemp(prefix="vllm-", dir=connection.folder))
            limit_s = cfg.vllm.start_timeout_s + settings.publish_timeout_s + SLACK_S
            write_model(folder, checkpoint)
            enlarged = asdict(taken.enlarged(settings))
            needs = connection.ask("start", enlarged, str(folder), limit_s=limit_s)
        if needs == "weights":
            weights = first_weights(checkpoint)
            with memory_file() as path:
                delivery = FromProcess.written(path, weights, weights_digest(weights), version)
                connection.ask("first", asdict(delivery), limit_s=patience)
        return HostPolicy(taken, settings, version)
    except BaseException:
        connection.socket.close()
        taken.close()
        raise
