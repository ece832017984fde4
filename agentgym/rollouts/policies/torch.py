"""The built-in engine: continuous batching with a key-value cache over a Hugging Face model, and
reproducible sampling: a token is a function of a `SampleKey` and logits.

Every forward takes all admitted requests: a fresh prompt, the tail of a grown one, the last token
of a running one.
A sequence's keys and values stay in its slot between turns, so a turn costs only its new tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from agentgym.config import RunConfig
from agentgym.defaults import return_memory
from agentgym.models.attention import PackedSequences, require_ragged, run_packed
from agentgym.models.cache import CachedRows, KeyValueCache
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.fidelity import TORCH, Tolerances
from agentgym.models.half import keep_wide_weights
from agentgym.models.model import load_weights, set_threads
from agentgym.models.networks import common_tokens
from agentgym.models.transport import require_newer
from agentgym.rollouts.policies.engines import Meter
from agentgym.types import Completion, Delivery, EngineUsage, SampleKey, Sampling

logger = logging.getLogger(__name__)

LONG_S = 0.02  # a longer forward must not block the event loop, which reads environments' replies
SHARED_TOKENS = 16  # a shorter prefix is computed again, not copied from another slot


@dataclass(slots=True)
class _Slot:
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values the cache holds
    owner: SampleKey | None = None
    busy: bool = False
    used_at: int = 0


@dataclass(slots=True, eq=False)  # two requests may have equal fields
class _Request:
    prompt: list[int]
    sampling: Sampling
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    done: asyncio.Future[Completion]
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def tokens(self, start: int) -> list[int]:
        """Return the tokens of prompt and action from index `start` on."""
        first = start - len(self.prompt)
        return self.ids[first:] if first >= 0 else self.prompt[start:] + self.ids


class TorchPolicy:
    """Policy that samples with a model of its own; only `publish` changes the weights."""

    repeats_draws: ClassVar[bool] = True
    tolerances: ClassVar[Tolerances] = TORCH

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Collection[int],
        num_slots: int,
        context_tokens: int,
        share_prefixes: bool = True,
        threads: int = 1,
    ) -> None:
        """Allocate slots for an engine that owns the model.
        model: built with RAGGED attention, set to `eval` here. stop_ids: each ends an action.
        context_tokens: maximum of prompt and action.
        num_slots: sequences decoded together; further requests wait. share_prefixes: compute a
        prefix common to several prompts only once. threads: CPU threads of a forward.
        """
        require_ragged(model)
        self._model = model.eval()
        keep_wide_weights(model)
        self._cache = KeyValueCache.of(model, num_slots=num_slots, context_tokens=context_tokens)
        self._device = next(model.parameters()).device
        self._stop_ids, self._context, self._share = stop_ids, context_tokens, share_prefixes
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[SampleKey, int] = {}  # by owner
        self._waiting, self._active = list[_Request](), list[_Request]()
        self._pump: asyncio.Task[None] | None = None
        self._num_publishing = self._clock = 0
        self._forward_s = math.inf  # seconds of the last forward
        self._forwarding: asyncio.Future[tuple[list[int], list[float]]] | None = None
        self._thread = ThreadPoolExecutor(1, "forward", initializer=lambda: set_threads(threads))
        self._meter = Meter()
        self._awake = asyncio.Event()
        self._awake.set()
        self.version = 0

    @classmethod
    def open(
        cls, cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int
    ) -> TorchPolicy:
        """Return a policy that takes over the checkpoint's model: it is not copied, but moved to
        `cfg.compute_device`. num_slots: see `__init__`. version: number of the model's weights.
        """
        policy = cls(
            checkpoint.model.to(cfg.compute_device),
            stop_ids=checkpoint.renderer.stop_ids,
            num_slots=num_slots,
            context_tokens=cfg.model.context_tokens,
            share_prefixes=not cfg.deterministic,
            threads=cfg.engine_threads,
        )
        policy.version = version
        return policy

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one action, see `Policy.generate`."""
        sampling.require_room(prompt_ids, self._context)
        numbers = uniforms(sampling.key, sampling.max_new_tokens)
        done = asyncio.get_running_loop().create_future()
        request = _Request(prompt_ids, sampling, numbers, done)
        self._waiting.append(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await request.done
        finally:
            self._drop(request)

    async def publish(self, delivery: Delivery) -> None:
        """Change to new weights, see `Policy.publish`; every cached key and value is dropped."""
        weights = await delivery.weights()
        self._num_publishing += 1
        try:
            await self._idle()
            # only now: another publish may have finished while this one waited
            require_newer(delivery.version, self.version)
            load_weights(self._model, weights)
            keep_wide_weights(self._model)
            self._forget()
            self.version = delivery.version
        finally:
            self._num_publishing -= 1

    async def usage(self) -> EngineUsage:
        return self._meter.usage()

    async def sleep(self) -> None:
        """Wait for actions; free key-value cache and float32 copies. Requests wait for `wake`."""
        self._awake.clear()
        await self._idle()
        self._forget()
        self._cache.free()
        keep_wide_weights(self._model)
        return_memory()

    async def wake(self) -> None:
        self._awake.set()

    async def close(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
        self._fail(RuntimeError("the engine was closed"))
        self._thread.shutdown()
        self._cache.free()

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Score sequences for the canary, see `Policy.score`."""
        device = self._device
        starts = torch.tensor([0, *np.cumsum([len(sequence) for sequence in sequences])])
        layout = PackedSequences(starts.to(device))
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        with torch.inference_mode():
            logits = run_packed(self._model, ids, layout).logits[0].float()
            scores = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0].cpu()
            return [scores[int(a) : int(b) - 1].clone() for a, b in pairwise(starts)]

    async def _run(self) -> None:
        try:
            while self._waiting or self._active:
                if not self._active and not self._awake.is_set():
                    self._measure()
                    await self._awake.wait()
                self._admit()
                self._measure()
                await self._step()
                await asyncio.sleep(0)  # let the event loop read environments' replies
        except Exception as error:
            logger.exception(
                "engine failed with %d requests running and %d waiting",
                len(self._active),
                len(self._waiting),
            )
            self._fail(RuntimeError(f"engine failed: {type(error).__name__}: {error}"), error)
        finally:
            self._measure()

    def _measure(self) -> None:
        self._meter.requests(running=len(self._active), waiting=len(self._waiting))

    async def _idle(self) -> None:
        """Wait until no action is running, and no forward whose actions were cancelled."""
        while True:  # each pass lets the engine do one forward
            if self._forwarding is not None:
                await asyncio.wait([self._forwarding])
            if not self._active:
                return
            await asyncio.sleep(0)

    def _fail(self, failure: RuntimeError, cause: BaseException | None = None) -> None:
        """Fail every request: callers would otherwise wait forever. Mark every slot as empty."""
        failure.__cause__ = cause
        for request in [*self._active, *self._waiting]:
            if not request.done.done():
                request.done.set_exception(failure)
        self._active, self._waiting = [], []
        self._forget()

    def _forget(self) -> None:
        """Mark every slot as free and empty."""
        self._slot_of.clear()
        for slot in self._slots:
            slot.ids, slot.owner, slot.busy, slot.used_at = [], None, False, 0

    def _admit(self) -> None:
        """Give waiting requests a slot: the episode's own if it still has one, else the one unused
        for longest.
        None is admitted during sleep or publishing, or if fewer wait than run: a forward of few
        sequences costs little less than one of many.
        A prompt that shares a prefix with one that begins now waits until the prefix is computed.
        """
        is_held = self._num_publishing or not self._awake.is_set()
        if is_held or len(self._waiting) < len(self._active):
            return
        admitted: list[list[int]] = []
        for request in list(self._waiting):
            if len(self._active) == len(self._slots):
                break
            prompt, owner = request.prompt, request.sampling.key._replace(turn=0)
            source, shared = -1, 0
            if self._share and owner not in self._slot_of:
                source, shared = self._alike(prompt)
                longer = shared + SHARED_TOKENS
                if any(common_tokens(other, prompt) >= longer for other in admitted):
                    continue
                admitted.append(prompt)
            request.slot = self._slot(owner)
            slot = self._slots[request.slot]
            if len(slot.ids) >= len(prompt) or prompt[: len(slot.ids)] != slot.ids:
                slot.ids = []
            if shared >= len(slot.ids) + SHARED_TOKENS:
                if source != request.slot:
                    self._cache.copy(source, request.slot, shared)
                slot.ids = prompt[:shared]
            self._meter.prompt(len(prompt), len(slot.ids))
            slot.busy = True
            self._waiting.remove(request)
            self._active.append(request)

    def _alike(self, prompt: list[int]) -> tuple[int, int]:
        """Return the slot that holds the longest prefix of a prompt, and the prefix's length.
        (-1, 0) if no slot has the prompt's first SHARED_TOKENS.
        """
        first, limit = prompt[:SHARED_TOKENS], len(prompt) - 1  # the last token must be computed
        candidates = [
            (min(common_tokens(slot.ids, prompt), limit), index)
            for index, slot in enumerate(self._slots)
            if slot.ids[:SHARED_TOKENS] == first
        ]
        shared, index = max(candidates, default=(0, -1))
        return index, shared

    def _slot(self, owner: SampleKey) -> int:
        """Assign a free slot to the owner, its earlier one if possible, and return the index."""
        previous = self._slot_of.get(owner)
        if previous is not None and not self._slots[previous].busy:
            return previous
        free = (index for index, slot in enumerate(self._slots) if not slot.busy)
        index = min(free, key=lambda index: self._slots[index].used_at)
        slot = self._slots[index]
        if slot.owner is not None and self._slot_of.get(slot.owner) == index:
            del self._slot_of[slot.owner]
        slot.ids, slot.owner = [], owner
        self._slot_of[owner] = index
        return index

    async def _step(self) -> None:
        """Run one forward over every active sequence, sample one token for each, and resolve the
        requests that end with it.
        A long forward runs in its own thread, so that environments' replies are read meanwhile.
        """
        if not self._active:
            return
        self._clock += 1
        active = list(self._active)
        slots = [self._slots[request.slot] for request in active]
        fed = [request.tokens(len(slot.ids)) for request, slot in zip(active, slots, strict=True)]
        cached = [len(slot.ids) for slot in slots]
        if self._forward_s < LONG_S:
            tokens, logprobs = self._forward(active, fed, cached)
        else:
            loop = asyncio.get_running_loop()
            run = loop.run_in_executor(self._thread, self._forward, active, fed, cached)
            self._forwarding = run
            tokens, logprobs = await run
        for slot, ids in zip(slots, fed, strict=True):
            slot.ids += ids
            slot.used_at = self._clock
        for request, token, logprob in zip(active, tokens, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            stops = token in self._stop_ids
            if stops or len(request.ids) == request.sampling.max_new_tokens:
                reason: Literal["stop", "length"] = "stop" if stops else "length"
                if not request.done.done():
                    logprobs_given = tuple(request.logprobs if request.sampling.logprobs else ())
                    request.done.set_result(
                        Completion(tuple(request.ids), logprobs_given, reason, self.version)
                    )
                self._drop(request)

    @torch.inference_mode()
    def _forward(
        self, active: list[_Request], fed: list[list[int]], cached: list[int]
    ) -> tuple[list[int], list[float]]:
        """Return (sampled tokens, their log-probabilities), one for each active request.

        fed: the uncached tokens of each request; cached: the number of cached ones.
        """
        began = time.perf_counter()
        layout = CachedRows(
            self._cache, [request.slot for request in active], cached, [len(ids) for ids in fed]
        )
        device = self._device
        packed = torch.tensor([token for ids in fed for token in ids], device=device)
        logits = run_packed(self._model, packed, layout, logits_to_keep=layout.last).logits[0]
        tokens, logprobs = sample(
            logits.float(),
            torch.tensor([request.sampling.temperature for request in active], device=device),
            torch.tensor([request.uniforms[len(request.ids)] for request in active], device=device),
        )
        self._forward_s = time.perf_counter() - began
        return tokens.tolist(), logprobs.tolist()

    def _drop(self, request: _Request) -> None:
        """Forget a finished or cancelled request; its slot keeps the cache for the episode's
        next turn.
        """
        if request in self._active:
            self._active.remove(request)
            self._slots[request.slot].busy = False
        if request in self._waiting:
            self._waiting.remove(request)


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per sequence by inverting its distribution at `uniform`; temperature 0 takes
    the largest logit.

    logits: [R, V] float32; temperature, uniform: [R].
    Result: tokens [R] int64 and their natural-log probabilities [R] at that temperature (at
    temperature 1 for greedy rows).
    """
    distribution = Distribution(logits, temperature)
    tokens = distribution.draw(uniform)
    return tokens, distribution.logprobs(tokens)


class Distribution:
    """Next-token distributions of R sequences. Shapes as in `sample`; tokens: [R] int64."""

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        """Normalize the logits. temperature: [R], 0 for greedy rows."""
        self._greedy = temperature == 0
        self._logp = torch.log_softmax(
            logits / torch.where(self._greedy, 1.0, temperature)[:, None].to(logits.dtype), -1
        )
        self._cumulative = self._logp.double().exp().cumsum(-1)
        self._largest = logits.argmax(-1)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Natural-log probabilities [R] of tokens at the temperature, at 1 for greedy rows."""
        return self._logp.gather(1, tokens[:, None])[:, 0]

    def draw(self, uniform: Tensor) -> Tensor:
        """Return tokens [R] int64 whose intervals of cumulative probability contain `uniform`; in
        greedy rows those with the largest logit.
        """
        below = self._cumulative < uniform[:, None] * self._cumulative[:, -1:]
        drawn = below.sum(-1).clamp(max=self._logp.shape[-1] - 1)
        return torch.where(self._greedy, self._largest, drawn)

    def distance(self, uniform: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Distance of each token from the drawn one; 0 for the drawn token itself.

        Result: ([R] float64 probability between `uniform` and the token's interval, 0 for greedy
        rows; [R] nats below the largest, 0 for sampled rows).
        """
        before = (tokens - 1).clamp(min=0)[:, None]
        total = self._cumulative[:, -1]
        low = torch.where(tokens == 0, 0.0, self._cumulative.gather(1, before)[:, 0] / total)
        high = self._cumulative.gather(1, tokens[:, None])[:, 0] / total
        outside = torch.maximum(low - uniform, uniform - high).clamp(min=0)
        below = self._logp.max(-1).values - self.logprobs(tokens)
        return torch.where(self._greedy, 0.0, outside), torch.where(self._greedy, below, 0.0)


def uniforms(key: SampleKey, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `count` numbers in [0, 1) that depend only on the key, not on earlier draws.
    Every number is 53 bits of a digest of the key and of a block's number.
    """
    blocks = (key_digest(key, block) for block in range(-(-count // 8)))
    words = np.frombuffer(b"".join(blocks), dtype="<u8")[:count] >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def key_digest(key: SampleKey, block: int) -> bytes:
    text = "\x1f".join(map(str, key)).encode()
    return hashlib.blake2b(text, salt=block.to_bytes(4, "little")).digest()
