"""Policy losses and what is measured beside them: pure, tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor


def clip_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """The clipped surrogate of each action token, to be minimised.

    All [n]; old_logprobs: the learner's own before the update. Result: [n], -min(rho A, clip(rho) A).
    Source: PPO, arXiv:1707.06347; separate bounds: DAPO, arXiv:2503.14476.
    """
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


LOSSES: dict[str, Callable[..., Tensor]] = {"clip": clip_loss}


def aggregation_weights(rows: Tensor, num_rows: int, aggregation: Literal["token", "sequence"]) -> Tensor:
    """What each token's loss is multiplied by before summing, so that no split into micro-batches changes the sum.

    rows: [n] int64, the row of each action token. token: every token of the batch counts the same (DAPO). sequence: the
    mean over each row's tokens, then over rows (GRPO as published). Result: [n], summing to 1.
    """
    if aggregation == "token":
        return torch.full((len(rows),), 1.0 / max(len(rows), 1))
    counts = torch.bincount(rows, minlength=num_rows)
    return 1.0 / (counts[rows] * (counts > 0).sum())


def importance_weights(learner_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(w, cap) with w = pi_learner / pi_engine of each action token: truncated importance sampling. All [n]."""
    return (learner_logprobs - engine_logprobs).exp().clamp(max=cap)


def mismatch(learner_logprobs: Tensor, engine_logprobs: Tensor) -> dict[str, float]:
    """How far the engine that sampled is from the learner that trains, over action tokens. Both [n], n >= 1.

    kl: mean of k3 = w - 1 - log w, an unbiased estimate of KL(engine || learner), nats per token; max_abs: largest
    difference of a log-probability; ess: effective sample size of the weights as a share of n.
    """
    log_ratio = (learner_logprobs - engine_logprobs).double()
    weights = log_ratio.exp()
    return {
        "kl": float((weights - 1 - log_ratio).mean()),
        "max_abs": float(log_ratio.abs().max()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    }
