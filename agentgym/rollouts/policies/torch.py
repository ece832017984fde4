"""The built-in engine: a continuously batched key-value loop over Hugging Face weights.

Every forward takes whatever waits: a fresh prompt, the tail of a grown one, the last token of a
running one.
A sequence's keys and values stay in its slot between turns, so a turn costs its new tokens alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from agentgym.models.attention import CachedRows, KeyValueCache, PackedSequences, require_ragged
from agentgym.models.model import load_weights
from agentgym.types import Completion, SampleKey, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the same weights may be from themselves in a forward of another shape."""

    mass: float  # probability between a uniform and the interval of the token it drew
    nats: float  # of log-probabilities, and by which a greedy token may be below the largest


# Of this engine, by dtype of its weights; about ten times what tiny models show. Others: none is
# stated.
TOLERANCES = {
    torch.float32: Tolerance(mass=1e-4, nats=1e-3),
    torch.float16: Tolerance(mass=1e-3, nats=0.05),
    torch.bfloat16: Tolerance(mass=1e-2, nats=0.3),
}


@dataclass(slots=True)
class _Slot:
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values the cache holds
    owner: SampleKey | None = None
    busy: bool = False
    used_at: int = 0


@dataclass(slots=True, eq=False)  # two requests may ask the same thing
class _Request:
    prompt: list[int]
    sampling: Sampling
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    done: asyncio.Future[Completion]
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def tokens(self, start: int) -> list[int]:
        """Those of prompt and action from `start` on."""
        asked = len(self.prompt)
        return self.ids[start - asked :] if start >= asked else self.prompt[start:] + self.ids


class TorchPolicy:
    """Samples with its own copy of the weights; `publish` is the only way they change."""

    # A SampleKey and the weights determine a token, so an audit can tell a draw from a choice.
    # Of an engine without this, an audit can say how likely a token was, and no more.
    repeats_draws: ClassVar[bool] = True

    def __init__(self, model: Any, *, stop_id: int, num_slots: int, context_tokens: int) -> None:
        """model: built with RAGGED attention. num_slots: sequences decoded together; more requests
        wait their turn.
        """
        require_ragged(model)
        self._model = model.eval()
        self._cache = KeyValueCache.of(model, num_slots=num_slots, context_tokens=context_tokens)
        self._stop_id, self._context = stop_id, context_tokens
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[SampleKey, int] = {}  # by owner
        self._waiting: list[_Request] = []
        self._active: list[_Request] = []
        self._pump: asyncio.Task[None] | None = None
        self._num_publishing = 0
        self._clock = 0
        self.version = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """One action: until the stop token or `max_new_tokens`.

        Errors: ValueError where prompt and action cannot fit the context; RuntimeError where the
        engine itself fails.
        """
        if not prompt_ids or sampling.max_new_tokens < 1:
            raise ValueError(
                f"nothing to sample from {len(prompt_ids)} prompt tokens with max_new_tokens"
                f" {sampling.max_new_tokens}"
            )
        if len(prompt_ids) + sampling.max_new_tokens > self._context:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens + max_new_tokens {sampling.max_new_tokens}"
                f" exceeds the context of {self._context}"
            )
        request = _Request(
            prompt_ids,
            sampling,
            uniforms(sampling.key, sampling.max_new_tokens),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await request.done
        finally:
            self._drop(request)

    async def publish(self, weights: dict[str, Tensor], version: int) -> None:
        """Replace the weights between turns: running actions end, later ones wait, every cached
        key and value is forgotten.

        Errors: ValueError where a version does not grow or the weights do not fit; the engine then
        goes on as before.
        """
        self._num_publishing += 1
        try:
            while self._active:  # noqa: ASYNC110 - each pass lets the engine do one forward
                await asyncio.sleep(0)
            if version <= self.version and not version == self.version == 0:
                raise ValueError(
                    f"weight versions must grow: engine holds {self.version}, got {version}"
                )
            load_weights(self._model, weights)
            self._forget()
            self.version = version
        finally:
            self._num_publishing -= 1

    @torch.inference_mode()
    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Natural-log probability of each token after the first of each sequence, at temperature 1:
        what the canary compares. [T - 1] float32 for a sequence of T.
        """
        device = self._cache.keys.device
        starts = torch.tensor([0, *np.cumsum([len(sequence) for sequence in sequences])])
        layout = PackedSequences(starts.to(device))
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        logits = (
            self._model(
                input_ids=ids[None],
                position_ids=layout.position[None],
                use_cache=False,
                layout=layout,
            )
            .logits[0]
            .float()
        )
        scores = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0].cpu()
        return [scores[int(a) : int(b) - 1].clone() for a, b in pairwise(starts)]

    async def _run(self) -> None:
        try:
            while self._waiting or self._active:
                self._admit()
                self._step()
                await asyncio.sleep(0)  # let replies of environments in
        except Exception as error:
            logger.exception(
                "engine failed with %d requests running and %d waiting",
                len(self._active),
                len(self._waiting),
            )
            # whoever waits must hear of it; a silent engine is a hang
            for request in [*self._active, *self._waiting]:
                if not request.done.done():
                    failure = RuntimeError(f"engine failed: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    request.done.set_exception(failure)
            self._active, self._waiting = [], []
            self._forget()

    def _forget(self) -> None:
        """Every slot is free and holds nothing."""
        self._slot_of.clear()
        for slot in self._slots:
            slot.ids, slot.owner, slot.busy = [], None, False

    def _admit(self) -> None:
        """Give waiting requests a slot: the episode's own where it still has one, else the
        longest unused.

        Those that wait join as many as they are, or an engine that is free: a forward of few
        sequences costs little less than one of many.
        """
        if len(self._waiting) < len(self._active):
            return
        while self._waiting and not self._num_publishing and len(self._active) < len(self._slots):
            request = self._waiting.pop(0)
            request.slot = self._slot(request.sampling.key._replace(turn=0))
            slot = self._slots[request.slot]
            held = len(slot.ids)
            if held >= len(request.prompt) or request.prompt[:held] != slot.ids:
                slot.ids = []
            slot.busy = True
            self._active.append(request)

    def _slot(self, owner: SampleKey) -> int:
        """A free one, from now on the owner's."""
        mine = self._slot_of.get(owner)
        if mine is not None and not self._slots[mine].busy:
            return mine
        free = (index for index, slot in enumerate(self._slots) if not slot.busy)
        index = min(free, key=lambda index: self._slots[index].used_at)
        slot = self._slots[index]
        if slot.owner is not None and self._slot_of.get(slot.owner) == index:
            del self._slot_of[slot.owner]
        slot.ids, slot.owner = [], owner
        self._slot_of[owner] = index
        return index

    @torch.inference_mode()
    def _step(self) -> None:
        """One forward over every active sequence, one token sampled for each."""
        if not self._active:
            return
        self._clock += 1
        active = list(self._active)
        slots = [self._slots[request.slot] for request in active]
        fed = [request.tokens(len(slot.ids)) for request, slot in zip(active, slots, strict=True)]
        layout = CachedRows(
            self._cache,
            [r.slot for r in active],
            [len(slot.ids) for slot in slots],
            [len(ids) for ids in fed],
        )
        device = self._cache.keys.device
        packed = torch.tensor([token for ids in fed for token in ids], device=device)
        logits = self._model(
            input_ids=packed[None],
            position_ids=layout.position[None],
            use_cache=False,
            layout=layout,
            logits_to_keep=layout.last,
        ).logits[0]
        for slot, ids in zip(slots, fed, strict=True):
            slot.ids += ids
            slot.used_at = self._clock
        tokens, logprobs = sample(
            logits.float(),
            torch.tensor([request.sampling.temperature for request in active], device=device),
            torch.tensor([request.uniforms[len(request.ids)] for request in active], device=device),
        )
        for request, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            if token == self._stop_id or len(request.ids) == request.sampling.max_new_tokens:
                reason: Literal["stop", "length"] = "stop" if token == self._stop_id else "length"
                if not request.done.done():
                    request.done.set_result(
                        Completion(
                            tuple(request.ids), tuple(request.logprobs), reason, self.version
                        )
                    )
                self._drop(request)

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
    Result: tokens [R] int64 and their natural-log probabilities [R], of the distribution at that
    temperature (at temperature 1 where greedy).
    """
    distribution = Distribution(logits, temperature)
    tokens = distribution.draw(uniform)
    return tokens, distribution.logprobs(tokens)


class Distribution:
    """What R sequences of logits say of their next token. Shapes as in `sample`; tokens: [R]
    int64.
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        """temperature: [R], 0 where greedy."""
        self._greedy = temperature == 0
        self._logp = torch.log_softmax(
            logits / torch.where(self._greedy, 1.0, temperature)[:, None].to(logits.dtype), -1
        )
        self._cumulative = self._logp.double().exp().cumsum(-1)
        self._largest = logits.argmax(-1)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[R] natural-log probabilities at the temperature, at 1 where greedy."""
        return self._logp.gather(1, tokens[:, None])[:, 0]

    def draw(self, uniform: Tensor) -> Tensor:
        """[R] int64 tokens whose intervals hold `uniform`; the largest logit where greedy."""
        drawn = (
            (self._cumulative < uniform[:, None] * self._cumulative[:, -1:])
            .sum(-1)
            .clamp(max=self._logp.shape[-1] - 1)
        )
        return torch.where(self._greedy, self._largest, drawn)

    def distance(self, uniform: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """How far each token is from being the drawn one; 0 where it is.

        Result: ([R] float64 probability between `uniform` and the token's interval, 0 where greedy;
        [R] nats below the largest, 0 where sampled).
        """
        before = (tokens - 1).clamp(min=0)[:, None]
        total = self._cumulative[:, -1]
        low = torch.where(tokens == 0, 0.0, self._cumulative.gather(1, before)[:, 0] / total)
        high = self._cumulative.gather(1, tokens[:, None])[:, 0] / total
        outside = torch.maximum(low - uniform, uniform - high).clamp(min=0)
        below = self._logp.max(-1).values - self.logprobs(tokens)
        return torch.where(self._greedy, 0.0, outside), torch.where(self._greedy, below, 0.0)


def uniforms(key: SampleKey, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`count` numbers in [0, 1) that depend on the key alone, not on what was drawn before: 53
    bits each of a digest of the key and the block's number.
    """
    text = "\x1f".join(map(str, key)).encode()
    blocks = (
        hashlib.blake2b(text, salt=block.to_bytes(4, "little")).digest()
        for block in range(-(-count // 8))
    )
    words = np.frombuffer(b"".join(blocks), dtype="<u8")[:count] >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53
