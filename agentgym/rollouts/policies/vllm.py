"""vLLM as an engine: continuous batching in its own processes, weights through shared memory, and
only the adapter's weights if `why_merged` allows that.

No run can repeat its draws, because the sums of its kernels depend on the rest of the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from agentgym.config import RunConfig
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import SHARD_BYTES, Checkpoint, save_adapter
from agentgym.models.fidelity import VLLM, Tolerances
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import StoredTensors, export_tensors, require_fit
from agentgym.models.transport import (
    Broadcast,
    FromProcess,
    HandOver,
    TransportBroken,
    require_arrived,
    require_newer,
    shapes_of,
    write_weights,
)
from agentgym.rollouts.policies.engine_settings import (
    EngineSettings,
    engine_arguments,
    engine_environment,
    settings_of,
    write_model,
)
from agentgym.rollouts.policies.engines import Meter
from agentgym.rollouts.policies.torch import key_digest
from agentgym.types import Completion, Delivery, EngineUsage, SampleKey, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOWEST = 0.01  # lowest temperature above 0
FIRST_ADAPTER = "adapter"  # folder of the adapter that the engine begins with


def _parameters(**options: Any) -> Any:
    """Return vLLM's SamplingParams for a request that is answered once, at its end, in tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **options, detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _of_tokens(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token in `ids`, which are the last positions of vLLM's
    flat lists. Pass a prompt without its first token, which has no log-probability.

    Errors: RuntimeError if the first entry of a position is of another token.
    """
    first = len(logprobs) - len(ids)
    starts = logprobs.start_indices[first:]
    entries = [(logprobs.token_ids[start], logprobs.logprobs[start]) for start in starts]
    for token, (returned, _) in zip(ids, entries, strict=True):
        if returned != token:
            raise RuntimeError(f"vLLM gave the log-probability of token {returned} for {token}")
    return [logprob for _, logprob in entries]


def seed_of(key: SampleKey) -> int:
    """Return a seed for vLLM's own sampler: 64 bits of the key's digest as a signed integer."""
    return int.from_bytes(key_digest(key, 0)[:8], "little", signed=True)


class VllmPolicy:
    """Policy that samples with vLLM's copy of the weights; `begin` and `publish` change them."""

    repeats_draws: ClassVar[bool] = False
    tolerances: ClassVar[Tolerances] = VLLM

    def __init__(self, engine: Any, folder: Path, settings: EngineSettings) -> None:
        """Wrap an engine. engine: an AsyncLLM. folder: this policy's own, removed by `close`."""
        self._engine, self._folder = engine, folder
        self._like, self._adapter = shapes_of(settings.layout), settings.adapter
        self._stop_ids, self._context = settings.stop_ids, settings.context_tokens
        self._lora: Any = None  # adapter that each request names; None: no adapter
        self._publish_timeout_s = settings.publish_timeout_s
        self._names, self._adapters = itertools.count(), itertools.count(1)
        self._num_running = self._num_waiting = self._num_publishing = 0
        self._num_slots = engine.vllm_config.scheduler_config.max_num_seqs
        self._meter = Meter()
        self._failure: RuntimeError | None = None
        self._changed, self._one_change = asyncio.Condition(), asyncio.Lock()
        self._awake, self._handing = True, HandOver()
        self.version, self.digest = 0, ""

    @classmethod
    def open(
        cls, cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int
    ) -> VllmPolicy:
        """Start an engine on `cfg.compute_device`, in child processes, with a checkpoint's weights.
        num_slots: episodes at a time. version: number of the weights.
        Errors: DigestMismatch, BlobMissing; those of vLLM if it cannot serve the model.
        """
        folder = Path(tempfile.mkdtemp(prefix="agentgym-vllm-"))
        adapter, weights = checkpoint.adapter, checkpoint.weights
        try:
            write_model(folder, checkpoint)
            if adapter is None and isinstance(weights, StoredTensors):
                weights.verify()
                export_tensors(weights, folder, SHARD_BYTES)
            elif adapter is None:
                write_weights(folder / WEIGHTS, weights_of(weights))
            elif adapter.stored is not None:
                save_adapter(folder / FIRST_ADAPTER, adapter, None)
            policy = cls.start(settings_of(cfg, checkpoint, num_slots), folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        policy.version = version
        if adapter is not None and adapter.stored is not None:
            policy._lora = policy._request()  # the first request with it reads the files
        return policy

    @classmethod
    def start(cls, settings: EngineSettings, folder: Path) -> VllmPolicy:
        """Start an engine in child processes; return its policy.
        folder: the policy's own from here on, with config.json and weights, deleted once read;
        without weights the engine starts with random ones and gets the first in `begin`.
        """
        with engine_environment(settings, folder):
            from vllm.v1.engine.async_llm import AsyncLLM

            engine = AsyncLLM.from_engine_args(engine_arguments(settings, folder))
        for path in folder.iterdir():  # vLLM has read these large files
            if path.is_file():
                path.unlink()
        return cls(engine, folder, settings)

    async def begin(self, digest: str, version: int, delivery: Delivery | None) -> None:
        """Begin a session with this version of these weights; earlier versions no longer count.
        Wake the engine, and let `usage` begin at zero again.
        digest: of the weights; empty: those below an adapter that is new. delivery: None if the
        engine holds the weights. Errors: see `publish`.
        """
        async with self._between_turns():
            self._meter = Meter()
            self.version = version if delivery is None else version - 1
            if not digest:
                self._lora, self.digest = None, ""
            await self.wake()
        if delivery is not None:
            await self.publish(delivery)

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one action, see `Policy.generate`.
        Errors: also ValueError if the temperature is below LOWEST and not 0.
        """
        sampling.require_room(prompt_ids, self._context)
        if 0 < sampling.temperature < LOWEST:
            raise ValueError(
                f"temperature {sampling.temperature:g}: vLLM samples at {LOWEST:g} instead; use"
                " that, or 0"
            )
        parameters = _parameters(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            seed=seed_of(sampling.key),
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(self._stop_ids),
            logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token only
        )
        async with self._turn():
            version, output = self.version, await self._answer(prompt_ids, parameters)
        self._meter.prompt(len(prompt_ids), output.num_cached_tokens or 0)
        action = output.outputs[0]
        ids = tuple(action.token_ids)
        reason: Literal["stop", "length"] = "stop" if ids[-1] in self._stop_ids else "length"
        logprobs = _of_tokens(action.logprobs, ids) if sampling.logprobs else ()
        return Completion(ids, tuple(map(float, logprobs)), reason, version)

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Score token sequences, see `Policy.score`. Errors: RuntimeError, also during sleep."""
        parameters = _parameters(temperature=1.0, max_tokens=1, prompt_logprobs=0)

        async def one(ids: list[int]) -> Tensor:
            logprobs = (await self._answer(ids, parameters)).prompt_logprobs
            return torch.tensor(_of_tokens(logprobs, ids[1:]), dtype=torch.float32)

        async with self._between_turns():  # alone, so that equal weights give equal bits
            if not self._awake:
                raise RuntimeError("vLLM sleeps, so it scores nothing; wake it first")
            return [await one(ids) for ids in sequences]

    async def publish(self, delivery: Delivery) -> None:
        """Change to new weights, and wake the engine.

        Every process of the engine first receives the weights and computes their digest; between
        turns all change to them and empty the prefix cache.
        Errors: see `Policy.publish`; TransportBroken. RuntimeError if the change fails half way:
        the engine then generates nothing any more.
        """
        here = f"vLLM on {socket.gethostname()}"
        for arrived in await self._stage(delivery):
            require_arrived(arrived, delivery.digest, delivery.version, here)
        async with self._between_turns():
            # only now, because another publish may have been first
            require_newer(delivery.version, self.version)
            await self.wake()
            await self._switch(delivery.digest, delivery.version)

    async def _stage(self, delivery: Delivery) -> list[str]:
        """Bring weights to every process of the engine; return the digests that these computed.

        A broadcast, and the weights of another process, go to these processes directly; other
        weights go to this process, which shares them.
        """
        if not isinstance(delivery, Broadcast | FromProcess):
            return await self._handing.send(delivery, self._stage)
        require_fit(shapes_of(delivery.layout), self._like, f"weights version {delivery.version}")
        if isinstance(delivery, Broadcast):
            answers = await self._rpc("stage_broadcast", asdict(delivery))
        elif delivery.shared is not None:
            answers = await self._rpc("stage_shared", delivery.shared, delivery.digest)
        else:
            return await self._rpc("stage_file", delivery.path, delivery.digest)
        if refused := next((broken for _, broken in answers if broken), ""):
            raise TransportBroken(refused)
        return [digest for digest, _ in answers]

    async def _switch(self, digest: str, version: int) -> None:
        try:
            if self._adapter is None:
                missing = sorted(set().union(*await self._rpc("switch_weights", digest)))
                if missing:
                    raise RuntimeError(f"{', '.join(missing[:3])} are not among the weights")
            else:
                self._lora = self._request()
                arguments = (digest, self._lora.lora_int_id, self._adapter, str(self._folder))
                await self._rpc("switch_adapter", *arguments)
                shutil.rmtree(self._folder / FIRST_ADAPTER, ignore_errors=True)
            if not await self._within("reset_prefix_cache", self._engine.reset_prefix_cache()):
                raise RuntimeError("its prefix cache could not be emptied")
        except BaseException as error:  # also if cancelled: weights may be new, the version old
            self._failure = RuntimeError(
                f"vLLM did not change to weights version {version}: {error}; it may hold a part of"
                " them, so it generates nothing any more"
            )
            if not isinstance(error, Exception):
                raise
            raise self._failure from error
        self.version, self.digest = version, digest

    def _request(self) -> Any:
        """Return vLLM's request for the next adapter, under a new number.

        A process that lacks this adapter looks for it in the folder of the first one. A switch
        removes that folder, so this process fails instead of sampling with a wrong adapter.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)
        return LoRARequest(f"adapter {number}", number, str(self._folder / FIRST_ADAPTER))

    async def usage(self) -> EngineUsage:
        return self._meter.usage()

    async def sleep(self) -> None:
        """Stop sampling; on a GPU, move the weights to host memory and drop the cache."""
        async with self._between_turns():
            self._awake = False
            if self._can_sleep:
                await self._within("sleep", self._engine.sleep(level=1))

    async def wake(self) -> None:
        """Let sampling continue. Errors: RuntimeError if a process of the engine is gone."""
        await self._within("check_health", self._engine.check_health())
        if self._can_sleep and not self._awake:
            await self._within("wake_up", self._engine.wake_up())
        async with self._changed:
            self._awake = True
            self._changed.notify_all()

    @property
    def _can_sleep(self) -> bool:
        return bool(self._engine.vllm_config.model_config.enable_sleep_mode)

    async def close(self) -> None:
        async with self._changed:
            self._failure = RuntimeError("the engine was closed")
            self._changed.notify_all()
        try:
            await asyncio.to_thread(self._engine.shutdown)
            # vLLM would shut down again when Python exits, after its modules are gone
            self._engine.shutdown = lambda *_, **__: None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _answer(self, ids: list[int], parameters: Any) -> Any:
        """Return vLLM's final output for a request. Errors: RuntimeError if the engine fails."""
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt, name = TokensPrompt(prompt_token_ids=ids), str(next(self._names))
        try:
            outputs = self._engine.generate(
                prompt, parameters, request_id=name, lora_request=self._lora
            )
            async for output in outputs:
                last = output
        except (EngineDeadError, EngineGenerateError) as error:
            raise RuntimeError(f"engine failed: {type(error).__name__}: {error}") from error
        ended = last.outputs[0].finish_reason
        if ended not in ("stop", "length"):  # a partial action, because the engine ends
            raise self._failure or RuntimeError(f"engine failed: a request ended with {ended!r}")
        return last

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a `WeightReceiver` method in each process; return results. Errors: see `_within`."""
        limit = self._publish_timeout_s
        answer = self._engine.collective_rpc(method, timeout=limit, args=arguments)
        return list(await self._within(method, answer))

    async def _within(self, what: str, answer: Awaitable[T]) -> T:
        """Wait for the engine's answer within the time limit. what: the call's name, for errors.
        Errors: RuntimeError if the engine is dead or too slow. After a timeout the engine is not
        called again: a late answer would be taken for the answer to another call.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        limit = self._publish_timeout_s
        try:
            return await asyncio.wait_for(answer, limit)
        except TimeoutError:
            self._failure = RuntimeError(f"vLLM: no answer to {what} within {limit:g} s")
            raise self._failure from None
        except EngineDeadError as error:
            raise RuntimeError(f"engine failed: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Count a request as running during the block. Before it, wait while weights change or the
        engine sleeps. Errors: RuntimeError if the engine failed or was closed.
        """
        async with self._changed:
            while not (self._failure or (self._awake and not self._num_publishing)):
                self._measure(waiting=1)
                try:
                    await self._changed.wait()
                finally:
                    self._measure(waiting=-1)
            if self._failure:
                raise self._failure
            self._measure(running=1)
        try:
            yield
        finally:
            self._measure(running=-1)  # before anything that may be cancelled
            async with self._changed:
                self._changed.notify_all()

    def _measure(self, *, running: int = 0, waiting: int = 0) -> None:
        """Add to the numbers of running and waiting requests and record them for `usage`. Running
        ones beyond vLLM's slots count as waiting.
        """
        self._num_running += running
        self._num_waiting += waiting
        begun = min(self._num_running, self._num_slots)
        total = self._num_running + self._num_waiting
        self._meter.requests(running=begun, waiting=total - begun)

    @asynccontextmanager
    async def _between_turns(self) -> AsyncIterator[None]:
        """Wait until no request runs; let none begin during the block. One such block at a time.
        Errors: RuntimeError if the engine failed or was closed.
        """
        async with self._one_change:
            self._num_publishing += 1
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._failure or not self._num_running)
                if self._failure:
                    raise self._failure
                yield
            finally:
                self._num_publishing -= 1
                async with self._changed:
                    self._changed.notify_all()
