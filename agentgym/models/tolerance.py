"""How far equal weights may be from each other, by engine and dtype: the one place that says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Of one engine and one dtype of weights."""

    forward: float  # nats between our forward and the model's own, when a model is loaded
    canary: float  # nats between engine and learner right after a publish
    mismatch_kl: float  # nats per token between engine and learner over a batch
    nats: float  # of a logged log-probability; by which a greedy token may be below the largest
    mass: float  # probability between a uniform and the interval of the token it drew


Tolerances = Mapping[torch.dtype, Tolerance]

# Of the built-in engine. It runs the learner's own model code, so that forwards of one shape are
# equal to the bit: the canary's limit is about a hundredth of what a forgotten publish shows at a
# learning rate of 1e-4. The others are of forwards of different shapes, about ten times what tiny
# models show.
TORCH: Tolerances = {
    torch.float32: Tolerance(forward=1e-3, canary=1e-4, mismatch_kl=0.05, nats=1e-3, mass=1e-4),
    torch.float16: Tolerance(forward=0.05, canary=1e-3, mismatch_kl=0.05, nats=0.05, mass=1e-3),
    torch.bfloat16: Tolerance(forward=0.25, canary=1e-2, mismatch_kl=0.05, nats=0.3, mass=1e-2),
}

# Of vLLM, whose kernels are not the learner's, and whose draws nobody repeats (mass). Of tiny
# models the noise is 1e-6 in float32 and 0.007 in bfloat16, of real ones in bfloat16 up to 0.5 for
# one token of thousands (huggingface/trl#6789); a publish forgotten at a learning rate of 1e-4
# shows 0.01.
VLLM: Tolerances = {
    torch.float32: Tolerance(forward=1e-3, canary=1e-3, mismatch_kl=0.05, nats=2e-3, mass=1.0),
    torch.float16: Tolerance(forward=0.05, canary=0.05, mismatch_kl=0.05, nats=0.1, mass=1.0),
    torch.bfloat16: Tolerance(forward=0.25, canary=0.3, mismatch_kl=0.05, nats=0.6, mass=1.0),
}
