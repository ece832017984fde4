"""vLLM as an engine: continuous batching in a process of its own, weights through shared memory, an
adapter alone where `why_merged` allows it.

Of what it draws no run repeats a token: its kernels' sums depend on what else is in the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from agentgym.config import RunConfig, VllmConfig
from agentgym.models.checkpoint import SHARD_BYTES, WEIGHTS, Checkpoint, save_adapter
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import StoredTensors, export_tensors, require_fit
from agentgym.models.tolerance import VLLM, Tolerances
from agentgym.models.transport import (
    Broadcast,
    FromProcess,
    InProcess,
    TransportBroken,
    is_on_gpu,
    memory_file,
    require_arrived,
    require_newer,
    shapes_of,
    shared_of,
    write_weights,
)
from agentgym.rollouts.policies.draw import seed_of
from agentgym.rollouts.policies.engine_settings import EngineSettings, settings_of, write_model
from agentgym.rollouts.policies.engines import VLLM_RANKS
from agentgym.rollouts.policies.meter import Meter
from agentgym.rollouts.policies.vllm_worker import OWNER, WeightReceiver
from agentgym.types import Completion, Delivery, EngineUsage, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOWEST = 0.01  # temperature but 0
FIRST_ADAPTER = "adapter"  # folder of the one that it begins with
MOST_BATCHED = 8192  # tokens of one forward, where a context is shorter
# what vLLM's processes are told; whoever sets one means it
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent to anybody
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # this process has threads
    # what it says to nobody who can do anything about it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def _parameters(**asked: Any) -> Any:
    """Return vLLM's parameters of a request that is answered once, at its end, with numbers."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **asked,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _of_tokens(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token out of vLLM's flat lists; a prompt's first position
    has none. A position's first entry is the token itself, whatever follows.
    """
    first = len(logprobs) - len(ids)
    places = logprobs.start_indices[first:]
    found = [(logprobs.token_ids[place], logprobs.logprobs[place]) for place in places]
    for token, (told, _) in zip(ids, found, strict=True):
        if told != token:
            raise RuntimeError(f"vLLM gave the log-probability of token {told} for {token}")
    return [logprob for _, logprob in found]


class VllmPolicy:
    """Samples with vLLM's copy of the weights; `publish` is the only way they change."""

    repeats_draws: ClassVar[bool] = False
    tolerances: ClassVar[Tolerances] = VLLM

    def __init__(self, engine: Any, folder: Path, settings: EngineSettings) -> None:
        """engine: an AsyncLLM. folder: this policy's own, removed by `close`."""
        self._engine, self._folder = engine, folder
        self._like, self._adapter = shapes_of(settings.layout), settings.adapter
        self._stop_ids, self._context = settings.stop_ids, settings.context_tokens
        self._lora: Any = None  # what each request names; None: the weights alone
        self._publish_timeout_s = settings.publish_timeout_s
        self._names, self._adapters = itertools.count(), itertools.count(1)
        self._num_running = self._num_waiting = self._num_publishing = 0
        self._num_slots = engine.vllm_config.scheduler_config.max_num_seqs
        self._meter = Meter()
        self._failure: RuntimeError | None = None
        self._changed = asyncio.Condition()
        self._one_change = asyncio.Lock()
        self._awake = self._shares = True
        self.version, self.digest = 0, ""

    @classmethod
    def open(
        cls, cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int
    ) -> VllmPolicy:
        """An engine below this process, on `cfg.compute_device`, with the checkpoint's weights.
        Errors: what vLLM raises where it cannot serve the model.
        """
        folder, adapter = Path(tempfile.mkdtemp(prefix="agentgym-vllm-")), checkpoint.adapter
        try:
            write_model(folder, checkpoint)
            if adapter is None:
                _write_weights(folder, checkpoint)
            elif adapter.stored is not None:
                save_adapter(folder / FIRST_ADAPTER, adapter, None)
            policy = cls.start(settings_of(cfg, checkpoint, num_slots), folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        policy.version = version
        if adapter is not None and adapter.stored is not None:
            policy._lora = policy._request()  # the first of these reads the files
        return policy

    @classmethod
    def start(cls, settings: EngineSettings, folder: Path) -> VllmPolicy:
        """An engine below this process. folder: its own from here on, with config.json and weights;
        without these the engine has random ones, and gets its first in `begin`.
        """
        with _environment(settings, folder):
            from vllm.v1.engine.async_llm import AsyncLLM

            engine = AsyncLLM.from_engine_args(_arguments(settings, folder))
        for each in folder.iterdir():  # read by now, and large
            if each.is_file():
                each.unlink()
        return cls(engine, folder, settings)

    async def begin(self, digest: str, version: int, delivery: Delivery | None) -> None:
        """Begin a session: from here on this version of these weights counts, whatever was held.

        digest: of the weights, empty: the ones below an adapter that is new. delivery: None if the
        engine holds them.
        Errors: as `publish`.
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
        """One action: until a stop token or `max_new_tokens`.

        Errors: ValueError where prompt and action cannot fit the context; RuntimeError where the
        engine itself fails.
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
            logprobs=0,  # of the sampled token alone
        )
        async with self._turn():
            version = self.version
            output = await self._answer(prompt_ids, parameters)
        self._meter.prompt(len(prompt_ids), output.num_cached_tokens or 0)
        said = output.outputs[0]
        ids = tuple(said.token_ids)
        reason: Literal["stop", "length"] = "stop" if ids[-1] in self._stop_ids else "length"
        logprobs = tuple(map(float, _of_tokens(said.logprobs, ids)))
        return Completion(ids, logprobs, reason, version)

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """As `Policy.score`."""
        parameters = _parameters(temperature=1.0, max_tokens=1, prompt_logprobs=0)

        async def one(ids: list[int]) -> Tensor:
            told = (await self._answer(ids, parameters)).prompt_logprobs
            return torch.tensor(_of_tokens(told, ids[1:]), dtype=torch.float32)

        async with self._between_turns():  # equal weights score alike to the bit
            if not self._awake:
                raise RuntimeError("vLLM sleeps, so it scores nothing; wake it first")
            return [await one(ids) for ids in sequences]

    async def publish(self, delivery: Delivery) -> None:
        """Every process of the engine first takes them and tells their digest; between turns all
        change to them, and what was cached under the old ones is forgotten. It wakes.

        Errors: as `Policy.publish`; TransportBroken. RuntimeError where it fails half way: it then
        generates nothing any more.
        """
        for arrived in await self._stage(delivery):
            require_arrived(
                arrived, delivery.digest, delivery.version, f"vLLM on {socket.gethostname()}"
            )
        async with self._between_turns():
            require_newer(delivery.version, self.version)  # only now: others may have come first
            await self.wake()
            await self._switch(delivery.digest, delivery.version)

    async def _stage(self, delivery: Delivery) -> list[str]:
        """Return the digest that each process has of them. A broadcast and what another process
        holds come to them; all else comes to this process, which shares it with them.
        """
        what = f"weights version {delivery.version}"
        if isinstance(delivery, FromProcess):
            require_fit(delivery.shapes, self._like, what)
            if delivery.shared is None:
                return await self._rpc("stage_file", delivery.path, delivery.digest)
            answers = await self._rpc("stage_shared", delivery.shared, delivery.digest)
            if refused := next((broken for _, broken in answers if broken), ""):
                raise TransportBroken(refused)
            return [digest for digest, _ in answers]
        if isinstance(delivery, Broadcast):
            require_fit(delivery.shapes, self._like, what)
            answers = await self._rpc("stage_broadcast", asdict(delivery))
            for _, broken in answers:
                if broken:
                    raise TransportBroken(broken)
            return [digest for digest, _ in answers]
        weights: Mapping[str, Tensor]
        if isinstance(delivery, InProcess):
            weights = delivery.held
        else:
            weights = await delivery.weights()
        require_fit(weights, self._like, what)
        if self._shares and is_on_gpu(weights):
            answers = await self._rpc("stage_shared", shared_of(weights), delivery.digest)
            refused = next((broken for _, broken in answers if broken), "")
            if not refused:
                return [digest for digest, _ in answers]
            self._shares = False
            logger.warning("vLLM gets weights through the host's memory from now on: %s", refused)
        with memory_file() as path:
            await asyncio.to_thread(write_weights, path, weights)
            return await self._rpc("stage_file", str(path), delivery.digest)

    async def _switch(self, digest: str, version: int) -> None:
        try:
            if self._adapter is None:
                missing = sorted(set().union(*await self._rpc("switch_weights", digest)))
                if missing:
                    raise RuntimeError(f"{', '.join(missing[:3])} are not among the weights")
            else:
                await self._switch_adapter(self._adapter, digest)
            if not await self._within("reset_prefix_cache", self._engine.reset_prefix_cache()):
                raise RuntimeError("its prefix cache could not be emptied")
        except BaseException as error:  # cancelled, too: the old version has new weights
            self._failure = RuntimeError(
                f"vLLM did not change to weights version {version}: {error}; it may hold a part of"
                " them, so it generates nothing any more"
            )
            if not isinstance(error, Exception):
                raise
            raise self._failure from error
        self.version, self.digest = version, digest

    async def _switch_adapter(self, settings: dict[str, Any], digest: str) -> None:
        self._lora = self._request()
        asked = (digest, self._lora.lora_int_id, settings, str(self._folder))
        await self._rpc("switch_adapter", *asked)
        shutil.rmtree(self._folder / FIRST_ADAPTER, ignore_errors=True)

    def _request(self) -> Any:
        """For the next adapter, under a number of its own. A process without it looks into a folder
        that the first alone is in, and the engine ends.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)
        return LoRARequest(f"adapter {number}", number, str(self._folder / FIRST_ADAPTER))

    async def usage(self) -> EngineUsage:
        return self._meter.usage()

    async def sleep(self) -> None:
        """Where it runs on a GPU, weights go to the host's memory and the cache is dropped."""
        async with self._between_turns():
            self._awake = False
            if self._can_sleep:
                await self._within("sleep", self._engine.sleep(level=1))

    async def wake(self) -> None:
        """As `Policy.wake`. Errors: RuntimeError if a process of the engine is gone."""
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
            # vLLM does it once more when Python ends, with its modules gone
            self._engine.shutdown = lambda *_, **__: None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _answer(self, ids: list[int], parameters: Any) -> Any:
        """vLLM's last word on a request. Errors: RuntimeError."""
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
        if ended not in ("stop", "length"):  # a part of an action, of an engine that ends
            raise self._failure or RuntimeError(f"engine failed: a request ended with {ended!r}")
        return last

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """What each process of the engine answers. Errors: as `_within`."""
        limit = self._publish_timeout_s
        answer = self._engine.collective_rpc(method, timeout=limit, args=arguments)
        told: list[Any] = await self._within(method, answer)
        return told

    async def _within(self, what: str, answer: Awaitable[T]) -> T:
        """Errors: RuntimeError where the engine is dead, or does not answer in time: a late answer
        would be taken for another's, so it is asked nothing any more.
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
        """Of one request; waits while weights change."""
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
        """So many requests more. vLLM begins as many of those it was given as it has slots."""
        self._num_running += running
        self._num_waiting += waiting
        begun = min(self._num_running, self._num_slots)
        given = self._num_running + self._num_waiting
        self._meter.requests(running=begun, waiting=given - begun)

    @asynccontextmanager
    async def _between_turns(self) -> AsyncIterator[None]:
        """No request runs, and none begins; one change at a time."""
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


@contextmanager
def _environment(settings: EngineSettings, folder: Path) -> Iterator[None]:
    """In which vLLM starts its processes. folder: for their sockets, which it leaves behind."""
    vllm = VllmConfig(**settings.vllm)
    told = {
        **ENVIRONMENT,
        OWNER: str(os.getpid()),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(vllm.start_timeout_s)),
        "VLLM_CPU_KVCACHE_SPACE": str(vllm.cpu_cache_gib),
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    if vllm.tensor_parallel_size > 1:  # the CPU build would ask for a NUMA node for each
        told["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = dict(os.environ)
    os.environ.update({**told, **before, OWNER: told[OWNER]})
    try:
        yield
    finally:  # vLLM sets more, for processes that are not ours to tell
        os.environ.clear()
        os.environ.update(before)


def _arguments(settings: EngineSettings, folder: Path) -> Any:
    """What vLLM is started with."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm, context, on_gpu = (
        VllmConfig(**settings.vllm),
        settings.context_tokens,
        settings.device != "cpu",
    )
    rank = settings.adapter["r"] if settings.adapter else 0
    return AsyncEngineArgs(
        model=str(folder),
        load_format="auto" if any(folder.glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=True,  # tokens go in and come out
        dtype=settings.dtype,
        seed=0,  # each request has a seed of its own
        max_model_len=context,
        max_num_seqs=settings.num_slots,
        max_num_batched_tokens=max(MOST_BATCHED, context),
        # the CPU build cannot undo the draw of a prompt that it has read in part
        enable_chunked_prefill=on_gpu,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        generation_config="vllm",  # no top_p of the model's own
        tensor_parallel_size=vllm.tensor_parallel_size,
        # in a Ray actor it would choose actors, for which nobody has reserved room
        distributed_executor_backend="mp" if vllm.tensor_parallel_size > 1 else None,
        enforce_eager=not (on_gpu and vllm.compile),
        enable_sleep_mode=on_gpu,
        worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        trust_remote_code=False,
        **(
            {"enable_lora": True, "max_lora_rank": min(each for each in VLLM_RANKS if each >= rank)}
            if rank
            else {}
        ),
        **({"gpu_memory_utilization": vllm.memory_frac} if on_gpu else {}),
    )


def _write_weights(folder: Path, checkpoint: Checkpoint) -> None:
    weights = checkpoint.weights
    if isinstance(weights, StoredTensors):
        weights.verify()
        export_tensors(weights, folder, SHARD_BYTES)
    else:
        write_weights(folder / WEIGHTS, weights_of(weights))
