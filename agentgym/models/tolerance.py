"""How far equal weights may be from each other, by engine and dtype: the one place that says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The limits of one engine and one dtype of weights."""

    forward: float  # nats, root mean square between two honest forwards of other shapes or kernels
    canary: float  # nats, root mean square between engine and learner right after a publish
    mismatch_kl: float  # nats per token between engine and learner over a batch
    nats: float  # of a logged log-probability; by which a greedy token may be below the largest
    mass: float  # probability between a uniform and the interval of the token it drew
    rare: float = 0.0  # share of tokens that may exceed `nats` or `mass` in an audit
    most: float = 1.0  # how many times `nats` or `mass` those may reach


Tolerances = Mapping[torch.dtype, Tolerance]

# Of the built-in engine. It runs the learner's own model code, so that forwards of one shape are
# equal to the bit: honest publishes show 0 where one process learns, and SmolLM2-135M in bfloat16
# shows 0.04 after a publish forgotten at a learning rate of 1e-7. `forward` is the canary's limit
# where shapes differ (several ranks, an adapter): SmolLM2 shows 0.06 to 0.1, other weights over 1.
# In an audit forwards differ in shape, too. 2,283 tokens of SmolLM2 in bfloat16: mean 0.029 nats,
# 0.13 % above 0.3, none above 0.39; mean 0.0017 of the probability, 0.15 % above 0.03, none above
# 0.05. A token drawn by other random numbers is further off than 0.12 in four of five cases. Of
# 1,115 tokens after its warm start two lay 0.127 and 0.133 of the probability off; an audit judges
# what is beyond the hard bound by float32 arithmetic, from which the engine was 0.091 at most.
TORCH: Tolerances = {
    torch.float32: Tolerance(forward=1e-3, canary=1e-4, mismatch_kl=0.05, nats=1e-3, mass=1e-4),
    torch.float16: Tolerance(
        forward=0.05, canary=1e-3, mismatch_kl=0.05, nats=0.05, mass=4e-3, rare=0.01, most=4.0
    ),
    torch.bfloat16: Tolerance(
        forward=0.3, canary=1e-2, mismatch_kl=0.05, nats=0.3, mass=0.03, rare=0.01, most=4.0
    ),
}

# Of vLLM, whose kernels are not the learner's, and whose draws nobody repeats (mass). Its float32
# attention on a GPU computes in tf32: 0.0014 nats at most on the default model, where a publish
# forgotten at a learning rate of 1e-4 shows 0.01. In bfloat16 SmolLM2 shows 0.06 to 0.1, single
# tokens 0.6; smaller faults show by the share of the learner's change that arrived, see
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
