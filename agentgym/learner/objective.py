"""The objective of a policy-gradient update: losses of policy and critic, corrections for the
mismatch of engine and learner, and the distance from the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentgym.algorithms.batch import NOT_ASKED, Batch, Experience
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
    experience: Experience, scores: Tensor, algorithm: PolicyGradientConfig, step: int
) -> Experience:
    """Return the experience with the learner's log-probabilities and entropies, the corrections of
    each token's loss, and metrics of the distance from engine and reference.

    scores: [2, n] log-probabilities and entropies, nats, before the update; step: from 1.
    Errors: EngineMismatch if engine and learner disagree by more than `max_mismatch_kl`.
    """
    batch, (logprobs, entropies) = experience.batch, scores
    engine, limit = batch.logprobs[batch.action_mask], algorithm.max_mismatch_kl
    is_known = engine != NOT_ASKED
    gap = mismatch(logprobs[is_known], engine[is_known], cap=algorithm.importance_cap)
    if limit is not None and gap and not gap["kl"] <= limit:
        raise EngineMismatch(
            f"step {step}: engine and learner differ by KL {gap['kl']:.3g} nats per token (limit"
            f" {limit:g}, largest single difference {gap['max_abs']:.3g}); the engine holds other"
            " weights, another precision or another temperature, or rollout.max_staleness lets it"
            " fall too far behind"
        )
    metrics = {f"mismatch/{name}": value for name, value in gap.items()}
    weights = corrections_of(batch, logprobs, algorithm)
    if algorithm.correction.endswith("mask"):
        metrics["mismatch/dropped_frac"] = float((weights == 0).double().mean())
    if experience.reference is not None:
        apart = kl_penalty(logprobs, experience.reference, "k3")
        metrics["actor/reference_kl"] = float(apart.mean())
    return replace(
        experience, logprobs=logprobs, entropies=entropies, corrections=weights, metrics=metrics
    )


def corrections_of(batch: Batch, logprobs: Tensor, algorithm: PolicyGradientConfig) -> Tensor:
    """Return [n] factors that correct each action token's loss for the mismatch of engine and
    learner, see `corrections`. logprobs: [n] of the learner.
    """
    acted = batch.action_mask
    return corrections(
        logprobs,
        batch.logprobs[acted],
        batch.sequence[acted],
        correction=algorithm.correction,
        cap=algorithm.importance_cap,
        floor=algorithm.importance_floor,
    )


def policy_objective(
    network: PolicyNet,
    experience: Experience,
    algorithm: PolicyGradientConfig,
    weights: Tensor,
    computed: Tensor,
) -> LossFunction:
    """Return the policy's loss function of one update.

    weights: [n] weight of each token's loss. computed: [2, n], filled in place by the loss function
    with log-probabilities and entropies if the experience has none.
    """
    advantages, recipe = experience.advantages, recipe_of(algorithm.recipe)
    assert advantages is not None
    loss_of: PolicyLoss = named(POLICY_LOSSES, recipe.policy_loss)
    estimator = algorithm.kl_estimator or recipe.kl_estimator

    def policy_loss(part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = network(part, bool(algorithm.entropy_coef))
        if experience.logprobs is None or experience.corrections is None:
            before = logprobs.detach()
            computed[:, at] = torch.stack([before, entropy.detach()])
            correction = corrections_of(part, before, algorithm)
        else:
            before, correction = experience.logprobs[at], experience.corrections[at]
        actions = Actions(logprobs, before, advantages[at], part.sequence[part.action_mask])
        losses, logged = loss_of(actions, algorithm)
        losses = losses * correction
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * entropy
        if experience.reference is not None:
            apart = kl_penalty(logprobs, experience.reference[at], estimator)
            losses = losses + algorithm.kl_coef * apart
        moved, share = logprobs.detach() - before, weights[at]
        logged = {"entropy": entropy.detach(), "ratio_kl": moved.exp() - 1 - moved, **logged}
        return (losses * share).sum(), {name: value * share for name, value in logged.items()}

    return policy_loss


def critic_objective(
    critic: ValueNet | None,
    experience: Experience,
    algorithm: PolicyGradientConfig,
    num_minibatches: int,
) -> LossFunction | None:
    """Return the critic's loss function of one update; None without critic, values or targets.
    num_minibatches: factor of the loss, as a minibatch has about 1 / num_minibatches of the tokens.
    """
    values, targets = experience.values, experience.targets
    if values is None or targets is None or critic is None:
        return None
    assert isinstance(algorithm, ActorCriticConfig)

    def critic_loss(part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = value_loss(critic(part)[0], values[at], targets[at], clip=algorithm.value_clip)
        return (losses * (num_minibatches / len(values))).sum(), {}

    return critic_loss
