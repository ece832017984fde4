"""The section `algorithm` of params.yaml: one class of settings for each kind of recipe, so that a
setting without meaning for a recipe is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from agentgym.algorithms.recipe import (
    Aggregation,
    Correction,
    KlEstimator,
    KlPlace,
    Truncated,
    named,
    recipe_of,
)
from agentgym.config.section import Section, operational, setting, unknown_key

DEFAULT_RECIPE = "grpo"


@dataclass(frozen=True, slots=True)
class Loop:
    """The trainer of one kind of recipe, its data, and the state in which a stage starts."""

    trainer: str  # module with `train_stage`
    samples_every_step: bool = False  # else it learns from a set fixed at the start of the stage
    imitates: bool = False  # the demonstrations are part of that set
    prefers: bool = False  # the set consists of pairs
    begins_anew: bool = False  # each stage starts from the first weights, not from the last
    # each stage continues with the optimizer's state of the stage before
    keeps_optimizer: bool = False


class AlgorithmConfig(Section):
    loop: ClassVar[Loop]
    recipe: str = setting(
        DEFAULT_RECIPE, "algorithm: grpo, ppo, dpo, or another row of agentgym/algorithms/recipe.py"
    )

    def problems(self) -> Iterator[str]:
        truncated = getattr(self, "truncated", None)
        if truncated == "bootstrap" and not isinstance(self, ActorCriticConfig):
            yield (
                f"algorithm.truncated bootstrap needs a critic, and recipe {self.recipe}"
                " has none; use zero or mask, or ppo"
            )


class PolicyGradientConfig(AlgorithmConfig):
    """Settings of recipes that sample episodes for every optimizer step."""

    loop = Loop("agentgym.training.rl", samples_every_step=True, keeps_optimizer=True)

    truncated: Truncated | None = setting(
        None,
        "what a cut episode counts as; null: the recipe's own; bootstrap needs a critic",
        examples=["mask"],
    )
    aggregation: Aggregation | None = setting(
        None, "how token losses become one; null: the recipe's own", examples=["token"]
    )
    constant_length: PositiveInt | None = setting(
        None,
        "aggregation constant: action tokens; null: of the longest possible episode",
        examples=[2048],
    )
    clip_low: PositiveFloat = setting(
        0.2, "the ratio of new to old probability is clipped at 1 minus this"
    )
    clip_high: PositiveFloat = setting(
        0.28, "the ratio of new to old probability is clipped at 1 plus this"
    )
    kl_coef: float = setting(
        0.0,
        "weight of the KL penalty against the model training began with; 0: no such model",
        ge=0,
    )
    kl_estimator: KlEstimator | None = setting(
        None,
        "estimator of the KL penalty; null: the recipe's own; k3 is low_var_kl of verl: each"
        " token's is clamped to +-10, without gradient beyond",
        examples=["k3"],
    )
    kl_place: KlPlace | None = setting(
        None,
        "whether the KL penalty is in the loss or in the reward; null: the recipe's own",
        examples=["loss"],
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", ge=0)
    shuffle_rewards: bool = setting(
        False, "a control: outcomes are dealt to episodes at random, nothing can be learned"
    )
    epochs: PositiveInt = setting(1, "passes over one batch")
    minibatches: PositiveInt = setting(2, "optimizer updates per pass")
    correction: Correction = setting(
        "token_truncate",
        "what the importance weight w of learner against engine does: truncate, min(w, cap); mask,"
        " w within [floor, cap] and 0 outside; w of a token, or the product over a sequence;"
        " geometric_mask: 1 where the mean over a sequence is within, else 0; none: 1",
    )
    importance_cap: PositiveFloat = setting(2.0, "largest importance weight")
    importance_floor: float = setting(0.0, "masks: smallest importance weight", ge=0)
    max_mismatch_kl: PositiveFloat | None = setting(
        None,
        "nats per token between engine and learner, above which the run stops; null: what the"
        " engine states for the dtype of the weights, of batches that older ones had no part in",
        examples=[0.01],
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        recipe = recipe_of(self.recipe)
        kl_place = self.kl_place or recipe.kl_place
        estimator = self.kl_estimator or recipe.kl_estimator
        if kl_place == "loss" and estimator == "k1":
            yield (
                f"algorithm.kl_estimator k1 with kl_place loss (recipe {self.recipe}) has no"
                " expected gradient and holds the policy to nothing; use kl_estimator k2 or k3, or"
                " kl_place reward"
            )
        if kl_place == "reward" and recipe.standardises_groups:
            yield (
                f"algorithm.kl_place reward with recipe {self.recipe}, which divides by the"
                " deviation of each group: in a group of equal outcomes the noise of the KL"
                " becomes advantages of +-1; use kl_place loss, or a recipe that does not divide"
                " (rloo)"
            )
        if self.importance_floor >= self.importance_cap:
            yield (
                f"algorithm.importance_floor {self.importance_floor:g} must be below importance_cap"
                f" {self.importance_cap:g}"
            )
        if self.importance_floor and not self.correction.endswith("mask"):
            yield (
                f"algorithm.importance_floor {self.importance_floor:g} means nothing to correction"
                f" {self.correction}, which has none; leave it out, or use a mask"
            )


class SequenceRatioConfig(PolicyGradientConfig):
    """Settings of recipes with one ratio per sequence, which moves far less than a token's."""

    clip_low: PositiveFloat = setting(
        3e-4, "the ratio of a sequence's mean probabilities is clipped at 1 minus this"
    )
    clip_high: PositiveFloat = setting(
        4e-4, "the ratio of a sequence's mean probabilities is clipped at 1 plus this"
    )


class ClippedWeightConfig(PolicyGradientConfig):
    """Settings of recipes that clip the weight of each token's gradient: no token loses its
    gradient.
    """

    clip_low: PositiveFloat = setting(
        1.0, "the weight of a token's gradient is at least 1 minus this; 1: no bound", le=1
    )
    clip_high: PositiveFloat = setting(
        4.0, "the weight of a token's gradient is at most 1 plus this"
    )


class DynamicSamplingConfig(PolicyGradientConfig):
    """Settings of recipes that replace groups of equal rewards and penalize overlong episodes."""

    max_refills: NonNegativeInt = setting(
        3, "rounds of further items in place of groups with equal rewards"
    )
    overlong_buffer: float = setting(
        0.2, "share of the budget, its last, in which the overlong penalty grows", gt=0, le=1
    )
    overlong_penalty: PositiveFloat = setting(
        1.0, "reward that an episode at the end of the budget loses"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.truncated == "mask":
            yield (
                f"algorithm.truncated mask empties the groups that {self.recipe} compares; use zero"
            )


class DiscountedConfig(PolicyGradientConfig):
    """Settings of recipes that discount rewards over time."""

    gamma: float = setting(1.0, "discount per action token", gt=0, le=1)
    turn_rewards: bool = setting(
        False, "a turn's reward stands on its own last token, not the sum on the episode's last"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.turn_rewards and self.shuffle_rewards:
            yield (
                "algorithm.shuffle_rewards deals outcomes of whole episodes; use it with"
                " turn_rewards false"
            )


class ActorCriticConfig(DiscountedConfig):
    """Settings of recipes with a critic."""

    dual_clip: float = setting(3.0, "largest loss per unit of negative advantage", gt=1)
    gae_lambda: float = setting(
        1.0, "lambda of generalized advantage estimation, per action token", ge=0, le=1
    )
    critic_lr: PositiveFloat = setting(1e-3, "learning rate of the critic")
    critic_warmup_steps: NonNegativeInt = setting(
        5, "optimizer steps in which the critic alone learns"
    )
    value_clip: PositiveFloat = setting(
        0.2, "a value may move by so much in one step before its loss is clipped"
    )


class TurnActorCriticConfig(ActorCriticConfig):
    """Settings of recipes with a critic whose time steps are turns."""

    gamma: float = setting(1.0, "discount per turn", gt=0, le=1)
    gae_lambda: float = setting(
        1.0, "lambda of generalized advantage estimation, per turn", ge=0, le=1
    )
    turn_rewards: bool = setting(True, "a turn's reward counts for that turn, not for the last")


class ImitationConfig(AlgorithmConfig):
    """Supervised learning has no settings here; see the sections warm_start and optimizer."""

    loop = Loop("agentgym.training.offline", imitates=True, keeps_optimizer=True)


class ExplorationConfig(AlgorithmConfig):
    """Settings of recipes that learn from episodes sampled when a stage begins."""

    truncated: Truncated | None = setting(
        None, "what a cut episode counts as: zero or mask; null: the recipe's own"
    )
    num_items: PositiveInt = setting(
        128, "train items sampled at the start of a stage, rollout.group_size times each"
    )
    per_item: PositiveInt = setting(4, "most pairs or successes of one item")
    chunk_items: PositiveInt = operational(64, "items committed at a time")


class PreferenceConfig(ExplorationConfig):
    """Settings of recipes that learn from preference pairs, for example dpo."""

    loop = Loop("agentgym.training.offline", prefers=True)

    pairs_per_step: PositiveInt = setting(32, "pairs of one optimizer step")
    lr: PositiveFloat = setting(
        1e-4,
        "in place of optimizer.lr; at rates of the other recipes both sides of a pair soon lose all"
        " likelihood",
    )
    beta: PositiveFloat = setting(
        0.5, "how strongly the policy is held to the one the stage began with"
    )
    label_smoothing: float = setting(
        0.0, "assumed share of pairs that are the wrong way round", ge=0, lt=0.5
    )


class SelfTrainingConfig(ExplorationConfig):
    """Settings of recipes that learn from demonstrations and the policy's own successes."""

    loop = Loop("agentgym.training.offline", imitates=True, begins_anew=True)


FAMILIES: dict[str, type[AlgorithmConfig]] = {
    "policy_gradient": PolicyGradientConfig,
    "sequence_ratio": SequenceRatioConfig,
    "clipped_weight": ClippedWeightConfig,
    "dynamic_sampling": DynamicSamplingConfig,
    "discounted": DiscountedConfig,
    "actor_critic": ActorCriticConfig,
    "turn_actor_critic": TurnActorCriticConfig,
    "imitation": ImitationConfig,
    "preference": PreferenceConfig,
    "self_training": SelfTrainingConfig,
}


def family_of(recipe: str) -> type[AlgorithmConfig]:
    """Return the class of a recipe's settings. Errors: ValueError for an unknown recipe; for one of
    another package also those of its import.
    """
    if not isinstance(recipe, str):
        raise ValueError(f"algorithm.recipe: expected a name such as grpo, got {recipe!r:.80}")
    return cast(type[AlgorithmConfig], named(FAMILIES, recipe_of(recipe).settings))


def algorithm_config(recipe: str = DEFAULT_RECIPE, **settings: Any) -> AlgorithmConfig:
    """Return the settings of a recipe: an instance of the class from `family_of`, with the given
    `settings` and the class's defaults for all others.
    Errors: ValueError for an unknown recipe, a setting that it does not have, or a wrong value.
    """
    family = family_of(recipe)
    for name in settings:
        if name in family.model_fields:
            continue
        known = ", ".join(sorted(family.model_fields.keys() - {"recipe"})) or "none"
        if any(name in other.model_fields for other in FAMILIES.values()):
            raise ValueError(
                f"algorithm.{name} means nothing to recipe {recipe}; its settings: {known}"
            )
        raise ValueError(unknown_key(("algorithm",), name, family.model_fields))
    return family(recipe=recipe, **settings)


def max_refills(algorithm: AlgorithmConfig) -> int:
    """Return how many further rounds of items an optimizer step may draw; 0 without the setting."""
    return algorithm.max_refills if isinstance(algorithm, DynamicSamplingConfig) else 0


def carried_over(values: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """Return `values`, the settings of another recipe, without those that `recipe` lacks or reads
    differently. Unknown names stay, for the validation to report.
    """
    try:
        former, family = family_of(values.get("recipe", DEFAULT_RECIPE)), family_of(recipe)
    except ValueError:  # the validation reports it
        return dict(values)
    return {
        name: value
        for name, value in values.items()
        if name not in former.model_fields or _origin(former, name) is _origin(family, name)
    }


def _origin(family: type[AlgorithmConfig], name: str) -> type | None:
    """Return the class that declares the setting, `family` or a base of it; None if none does."""
    return next(
        (base for base in family.__mro__ if name in vars(base).get("__annotations__", ())), None
    )
