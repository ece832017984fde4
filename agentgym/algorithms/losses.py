"""Losses and their metrics: pure functions from tensors to tensors.

Shapes are [n] over action tokens unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentgym.algorithms.recipe import Aggregation, Correction, KlEstimator

K3_LIMIT = 10.0  # nats of one token


@dataclass(frozen=True, slots=True)
class Actions:
    """Input of a policy loss: the n action tokens of R whole sequences."""

    logprobs: Tensor  # [n] under the current weights, with gradient
    old_logprobs: Tensor  # [n] the learner's own before the update
    advantages: Tensor  # [n]
    sequence: Tensor  # [n] int64, ascending, 0 .. R - 1


class Clipping(Protocol):
    """Settings of a clipped loss."""

    clip_low: float
    clip_high: float


class DualClipping(Clipping, Protocol):
    dual_clip: float


# (actions, the section `algorithm`) -> ([n] losses, metrics of each token, [n] by name)
PolicyLoss = Callable[[Actions, Any], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(actions: Actions, algorithm: Clipping) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped(actions, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)


def dual_clip(actions: Actions, algorithm: DualClipping) -> tuple[Tensor, dict[str, Tensor]]:
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    return clipped(actions, **bounds, dual_clip=algorithm.dual_clip)


def gspo(actions: Actions, algorithm: Clipping) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with one ratio per sequence, the geometric mean of its tokens' ratios.

    s = exp(mean_t (log pi - log pi_old)); each token's loss is -min(s A, clip(s) A), so that the
    mean over a sequence (aggregation `sequence`) is the published loss of the sequence.
    Metrics: as `clipped`, with s for the ratio. Source: arXiv:2507.18071.
    """
    log_ratio = sequence_mean(actions.logprobs - actions.old_logprobs, actions.sequence)
    alike = replace(actions, logprobs=log_ratio, old_logprobs=torch.zeros_like(log_ratio))
    return ppo_clip(alike, algorithm)


def cispo(actions: Actions, algorithm: Clipping) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a clipped importance weight: -sg(clip(rho)) A log pi with rho = pi / pi_old
    (sg: no gradient). Every token keeps a gradient; `ppo_clip` gives none to clipped tokens.

    Metrics: clip_frac_low: rho < 1 - clip_low. clip_frac_high: rho > 1 + clip_high.
    clip_frac: either of them.
    Set `clip_low` to 1 for the published loss without a lower bound. Source: arXiv:2506.13585.
    """
    ratio = (actions.logprobs.detach() - actions.old_logprobs).exp()
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    binds = {"clip_frac_low": ratio < low, "clip_frac_high": ratio > high}
    losses = -ratio.clamp(low, high) * actions.advantages * actions.logprobs
    return losses, {"clip_frac": (ratio < low) | (ratio > high), **binds}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Replace each token's value by the mean over its sequence: [n]. sequence: [n] int64."""
    sums = _sequence_sum(values, sequence)
    return sums[sequence] / torch.bincount(sequence, minlength=len(sums))[sequence]


def _sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """Sum of the values of each sequence: [R]. sequence: [n] int64, 0 .. R - 1."""
    return values.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, values)


def clipped(
    actions: Actions, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the clipped surrogate loss of each action token, metric -> mask of the tokens that it
    clips, which get no gradient); all [n].

    Loss: -min(rho A, clip(rho) A) with rho = pi / pi_old. dual_clip: c > 1; if A < 0 the loss is
    at most -c A, so that a token with a very large ratio cannot dominate.
    clip_frac_low: rho < 1 - clip_low with A < 0. clip_frac_high: rho > 1 + clip_high with A > 0.
    clip_frac_dual, only with a dual clip: rho > c with A < 0. clip_frac: any of these.
    A ratio outside the bounds whose advantage has the other sign is not clipped.
    Source: PPO, arXiv:1707.06347; two bounds: DAPO, arXiv:2503.14476; dual clip: arXiv:1912.09729.
    """
    advantages, low, high = actions.advantages, 1 - clip_low, 1 + clip_high
    ratio = (actions.logprobs - actions.old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    ratio = ratio.detach()
    binds = {
        "clip_frac_low": (ratio < low) & (advantages < 0),
        "clip_frac_high": (ratio > high) & (advantages > 0),
    }
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        binds["clip_frac_dual"] = (ratio > dual_clip) & (advantages < 0)
    return loss, {"clip_frac": torch.stack(list(binds.values())).any(0), **binds}


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> Tensor:
    """Half the squared error of the critic's values, or of the values clipped to at most `clip`
    from the old ones if that is larger. All [n], the result too.
    Source: PPO, arXiv:1707.06347.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near - targets) ** 2)


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token from samples of the policy, in nats.

    All [n], the result too.
    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. The values of k1, and
    of k3 within its clamp, are unbiased.
    As losses on samples of the same policy k2 has the gradient of the reverse KL, k3 that of the
    forward KL, and k1 none on average.
    k3 is clamped to +-K3_LIMIT, like `low_var_kl` of verl, and has no gradient beyond it (d below
    -2.61 or above 11.0). Without the clamp, one token at d = -10 would count 22,015.
    Source: arXiv:2506.09477, arXiv:2512.21852; verl/trainer/ppo/core_algos.py.
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    d = d.clamp(-2 * K3_LIMIT, 2 * K3_LIMIT)  # an infinite exp would make the gradient NaN
    return ((-d).exp() + d - 1).clamp(-K3_LIMIT, K3_LIMIT)


def preference_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Loss of direct preference optimization for P pairs.

    chosen, rejected: [P], sums over the actions of all turns of log pi - log pi_ref.
    beta: factor of their difference. label_smoothing: assumed share of pairs in the wrong order.
    Result: [P]. Source: arXiv:2305.18290; over whole trajectories: ETO, arXiv:2403.02502.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def aggregation_weights(
    sequences: Tensor, num_sequences: int, aggregation: Aggregation, constant: float | None = None
) -> Tensor:
    """Weight of each action token's loss in the sum over the global batch: [n], the same for every
    split into micro-batches and ranks. Sequences without action tokens do not count.

    sequences: [n] int64, the sequence of each action token of the global batch.
    token: every token of the batch has the same weight (DAPO).
    sequence: the mean over each sequence's tokens, then over sequences (GRPO as published).
    constant: each sequence's sum over tokens / `constant`, then the mean over sequences (Dr.GRPO).
    The weights sum to 1, but not for constant. Errors: ValueError for it if `constant` is None.
    """
    if aggregation == "token":
        return torch.full((len(sequences),), 1.0 / max(len(sequences), 1), device=sequences.device)
    counts = torch.bincount(sequences, minlength=num_sequences)
    acting = (counts > 0).sum()
    if aggregation == "sequence":
        return 1.0 / (counts[sequences] * acting)
    if constant is None:
        raise ValueError("aggregation 'constant' needs the constant it divides by")
    return torch.ones(len(sequences), device=sequences.device) / (constant * acting)


def corrections(
    learner_logprobs: Tensor,
    engine_logprobs: Tensor,
    sequence: Tensor,
    *,
    correction: Correction,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Factor of each action token's loss that corrects the mismatch of engine and learner.

    All [n], the result too; sequence: int64, ascending.
    w: pi_learner / pi_engine of a token. W and M: product and geometric mean of w over a sequence.
    token_truncate: min(w, cap). token_mask: w if floor <= w <= cap, else 0 (with a floor: IcePop).
    sequence_truncate: min(W, cap). sequence_mask: W if floor <= W <= cap, else 0.
    geometric_mask: 1 if floor <= M <= cap, else 0; M does not depend on the sequence's length.
    none: 1, whatever the engine's are.
    """
    if correction == "none":
        return torch.ones_like(learner_logprobs)
    log_weights = learner_logprobs - engine_logprobs
    if correction.startswith("sequence"):
        log_weights = _sequence_sum(log_weights, sequence)[sequence]
    elif correction == "geometric_mask":
        log_weights = sequence_mean(log_weights, sequence)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        return weights.clamp(max=cap)
    within = (weights >= floor) & (weights <= cap)
    if correction == "geometric_mask":
        return within.to(weights.dtype)
    return torch.where(within, weights, 0.0)


def mismatch(learner_logprobs: Tensor, engine_logprobs: Tensor, *, cap: float) -> dict[str, float]:
    """Return metrics of the mismatch between sampling engine and learner, over action tokens.

    Both log-probabilities [n]; weights w = pi_learner / pi_engine. Empty if n is 0.
    kl: mean of k3 = w - 1 - log w, an unbiased estimate of KL(engine || learner), nats per token;
    max_abs: largest difference of a log-probability; ess: effective sample size of the weights as a
    share of n; outside_frac: share of weights outside [0.9, 1.1]; capped_frac: share of weights
    above `cap`.
    """
    if not len(engine_logprobs):
        return {}
    log_ratio = (learner_logprobs - engine_logprobs).double()
    weights = log_ratio.exp()
    return {
        "kl": float((weights - 1 - log_ratio).mean()),
        "max_abs": float(log_ratio.abs().max()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "outside_frac": float(((weights < 0.9) | (weights > 1.1)).double().mean()),
        "capped_frac": float((weights > cap).double().mean()),
    }
