"""Distance of the learner from the engine that sampled, and from the reference."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agentgym.algorithms.batch import Batch, Experience
from agentgym.algorithms.losses import corrections, kl_penalty, mismatch
from agentgym.config import PolicyGradientConfig
from agentgym.types import EngineMismatch


def scored(
    experience: Experience, scores: Tensor, config: PolicyGradientConfig, step: int
) -> Experience:
    """Return the experience with the learner's log-probabilities, its corrections, and its
    distance from engine and reference.

    scores: [2, n] log-probabilities and entropies, nats, before the update; step: from 1.
    Errors: EngineMismatch if engine and learner disagree by more than `max_mismatch_kl`.
    """
    batch, (logprobs, entropies) = experience.batch, scores
    metrics = _agreement(logprobs, batch.logprobs[batch.action_mask], config, step)
    weights = corrections_of(batch, logprobs, config)
    if config.correction.endswith("mask"):
        metrics["mismatch/dropped_frac"] = float((weights == 0).double().mean())
    if experience.reference is not None:
        apart = kl_penalty(logprobs, experience.reference, "k3")
        metrics["actor/reference_kl"] = float(apart.mean())
    return replace(
        experience, logprobs=logprobs, entropies=entropies, corrections=weights, metrics=metrics
    )


def corrections_of(batch: Batch, logprobs: Tensor, config: PolicyGradientConfig) -> Tensor:
    """Return `corrections` of a batch's action tokens; logprobs: [n] of the learner."""
    acted = batch.action_mask
    return corrections(
        logprobs,
        batch.logprobs[acted],
        batch.sequence[acted],
        correction=config.correction,
        cap=config.importance_cap,
        floor=config.importance_floor,
    )


def _agreement(
    learner: Tensor, engine: Tensor, config: PolicyGradientConfig, step: int
) -> dict[str, float]:
    """Return the metrics of `mismatch` between learner and engine on the batch.

    learner, engine: [n] log-probabilities, nats. Errors: EngineMismatch above the limit.
    """
    gap, limit = mismatch(learner, engine, cap=config.importance_cap), config.max_mismatch_kl
    if limit is not None and not gap["kl"] <= limit:
        raise EngineMismatch(
            f"step {step}: engine and learner differ by KL {gap['kl']:.3g} nats per token (limit"
            f" {limit:g}, largest single difference {gap['max_abs']:.3g}); the engine holds other"
            " weights, another precision or another temperature, or rollout.max_staleness lets it"
            " fall too far behind"
        )
    return {f"mismatch/{name}": value for name, value in gap.items()}
