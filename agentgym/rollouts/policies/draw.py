"""From a `SampleKey` and logits to a token: how an engine draws whose draws can be repeated."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgym.types import SampleKey


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
    blocks = (_digest(key, block) for block in range(-(-count // 8)))
    words = np.frombuffer(b"".join(blocks), dtype="<u8")[:count] >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def seed_of(key: SampleKey) -> int:
    """64 bits of the same digest, signed: for an engine that draws by itself."""
    return int.from_bytes(_digest(key, 0)[:8], "little", signed=True)


def _digest(key: SampleKey, block: int) -> bytes:
    text = "\x1f".join(map(str, key)).encode()
    return hashlib.blake2b(text, salt=block.to_bytes(4, "little")).digest()
