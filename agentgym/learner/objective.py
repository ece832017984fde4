"""The objective of a policy-gradient update: losses of policy and critic, corrections for the
distance from the engine that sampled, and the distance from the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentgym.algorithms.batch import Batch, Experience
from agentgym.algorithms.losses import (
    POLICY_LOSSES,
    Actions,
    PolicyLoss,
    corrections,
    kl_penalty,
    mismatch,
    value_loss,
)
from agentgym.algorithms.recipe import named, recipe_of
from agentgym.config import ActorCriticConfig, PolicyGradientConfig
from agentgym.learner.micro_batches import LossFunction
from agentgym.models.networks import PolicyNet, ValueNet
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


class PolicyObjective:
    """The policy's loss function of one update."""

    def __init__(
        self,
        network: PolicyNet,
        experience: Experience,
        config: PolicyGradientConfig,
        weights: Tensor,
    ) -> None:
        """Prepare the loss. weights: [n] weight of each token's loss."""
        assert experience.advantages is not None
        recipe = recipe_of(config.recipe)
        self._network, self._experience, self._config = network, experience, config
        self._advantages, self._weights = experience.advantages, weights
        self._loss_of: PolicyLoss = named(POLICY_LOSSES, recipe.policy_loss)
        self._estimator = config.kl_estimator or recipe.kl_estimator
        # [2, n] receives the log-probabilities and entropies that the experience lacks
        self.computed = experience.rewards.new_zeros(2, len(experience.rewards))

    def __call__(self, part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        config, experience, share = self._config, self._experience, self._weights[at]
        logprobs, entropy = self._network(part, bool(config.entropy_coef))
        if experience.logprobs is None or experience.corrections is None:
            before = logprobs.detach()
            self.computed[:, at] = torch.stack([before, entropy.detach()])
            correction = corrections_of(part, before, config)
        else:
            before, correction = experience.logprobs[at], experience.corrections[at]
        actions = Actions(logprobs, before, self._advantages[at], part.sequence[part.action_mask])
        losses, logged = self._loss_of(actions, config)
        losses = losses * correction
        if config.entropy_coef:
            losses = losses - config.entropy_coef * entropy
        if experience.reference is not None:
            apart = kl_penalty(logprobs, experience.reference[at], self._estimator)
            losses = losses + config.kl_coef * apart
        moved = logprobs.detach() - before
        logged = {
            "entropy": entropy.detach(),
            "ratio_kl": moved.exp() - 1 - moved,
            **logged,
        }
        return (losses * share).sum(), {name: value * share for name, value in logged.items()}


def critic_objective(
    critic: ValueNet | None,
    experience: Experience,
    config: PolicyGradientConfig,
    num_minibatches: int,
) -> LossFunction | None:
    """Return the critic's loss function; None without a critic."""
    values, targets = experience.values, experience.targets
    if values is None or targets is None or critic is None:
        return None
    assert isinstance(config, ActorCriticConfig)

    def critic_loss(part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = value_loss(critic(part)[0], values[at], targets[at], clip=config.value_clip)
        return (losses * (num_minibatches / len(values))).sum(), {}

    return critic_loss
