"""Reproducible sampling: from a `SampleKey` and logits to a token."""

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
        drawn = (
            (self._cumulative < uniform[:, None] * self._cumulative[:, -1:])
            .sum(-1)
            .clamp(max=self._logp.shape[-1] - 1)
        )
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
    blocks = (_digest(key, block) for block in range(-(-count // 8)))
    words = np.frombuffer(b"".join(blocks), dtype="<u8")[:count] >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def seed_of(key: SampleKey) -> int:
    """Return 64 bits of the key's digest, signed: a seed for an engine that samples by itself."""
    return int.from_bytes(_digest(key, 0)[:8], "little", signed=True)


def _digest(key: SampleKey, block: int) -> bytes:
    text = "\x1f".join(map(str, key)).encode()
    return hashlib.blake2b(text, salt=block.to_bytes(4, "little")).digest()
