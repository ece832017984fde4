"""Tolerances between forwards with equal weights, by engine and dtype, all in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The limits of one engine and one dtype of weights."""

    forward: float  # nats, root mean square between two correct forwards of other shapes or kernels
    canary: float  # nats, root mean square between engine and learner right after a publish
    mismatch_kl: float  # nats per token between engine and learner over a batch
    nats: float  # error of a logged log-probability; gap of a greedy token below the largest
    mass: float  # distance of a random number from its token's interval of probability
    rare: float = 0.0  # share of tokens that may exceed `nats` or `mass` in an audit
    most: float = 1.0  # hard limit for these tokens, as a multiple of `nats` or `mass`


Tolerances = Mapping[torch.dtype, Tolerance]

# The built-in engine runs the learner's own model code, so that forwards of one shape are equal to
# the bit: correct publishes show 0 if one process learns, and SmolLM2-135M in bfloat16 shows 0.04
# after a missed publish at a learning rate of 1e-7. `forward` is the canary's limit if shapes
# differ (several ranks, an adapter): SmolLM2 shows 0.06 to 0.1, wrong weights over 1.
# In an audit forwards differ in shape, too. 2,283 tokens of SmolLM2 in bfloat16 differed by
#   nats: mean 0.029, 0.13 % above 0.3, none above 0.39
#   probability: mean 0.0017, 0.15 % above 0.03, none above 0.05
# Among 1,115 tokens after the warm start, two differed by 0.127 and 0.133 of the probability.
# A token drawn by other random numbers differs by more than 0.12 in four of five cases.
# Beyond the hard limit an audit compares with float32 arithmetic, from which the engine differed
# by at most 0.091.
TORCH: Tolerances = {
    torch.float32: Tolerance(forward=1e-3, canary=1e-4, mismatch_kl=0.05, nats=1e-3, mass=1e-4),
    torch.float16: Tolerance(
        forward=0.05, canary=1e-3, mismatch_kl=0.05, nats=0.05, mass=4e-3, rare=0.01, most=4.0
    ),
    torch.bfloat16: Tolerance(
        forward=0.3, canary=1e-2, mismatch_kl=0.05, nats=0.3, mass=0.03, rare=0.01, most=4.0
    ),
}

# vLLM's kernels are not the learner's, and its draws cannot be repeated (mass). Its float32
# attention on a GPU computes in tf32: at most 0.0014 nats on the default model, while a missed
# publish at a learning rate of 1e-4 shows 0.01. In bfloat16 SmolLM2 shows 0.06 to 0.1, single
# tokens 0.6; smaller faults are found by the share of the learner's change that arrived, see
# `agentgym.rollouts.canary`.
VLLM: Tolerances = {
    torch.float32: Tolerance(forward=3e-3, canary=1.5e-3, mismatch_kl=0.05, nats=5e-3, mass=1.0),
    torch.float16: Tolerance(
        forward=0.05, canary=0.05, mismatch_kl=0.05, nats=0.1, mass=1.0, rare=0.01, most=4.0
    ),
    torch.bfloat16: Tolerance(
        forward=0.3, canary=0.3, mismatch_kl=0.05, nats=0.6, mass=1.0, rare=0.01, most=4.0
    ),
}
