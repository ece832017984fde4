"""The table of algorithms: an algorithm is a row of settings, not a trainer of its own. Also the
rule that decides if rewards are equal, so that their group carries no signal.

The module does not import torch, so that configuration can be checked without it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

Truncated = Literal["zero", "mask", "bootstrap"]
Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
Correction = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]
ENTRY_POINT_GROUP = "agentgym.recipes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The functions that make a loss from episodes, with their settings and requirements.

    advantages: a key of `advantages.ADVANTAGES`; policy_loss: a key of `losses.POLICY_LOSSES`; or
    for both a function of another package, as `module:function`. Empty: the algorithm has none.
    needs_groups: True if it compares trajectories of one item, so that `group_size` is at least 2.
    settings: the class of the section `algorithm`: a key of `agentgym.config.FAMILIES`, or a class
    of another package that extends one of them, as `module:Class`.
    truncated: treatment of an episode cut by horizon, context or the simulator's own step limit.
    `zero`: it keeps its reward so far (0 for an outcome reward), so that being too slow is a
    failure. `mask`: it is left out of the loss and the group statistics. `bootstrap`: the critic's
    value of the last state replaces the missing rewards. This is the state after the last
    observation, or the one of the last action token if the observation did not fit into the
    context.
    `zero` is the default of every row, also of PPO: runs are evaluated at a horizon, and a policy
    whose delays cost nothing learns to delay.
    aggregation: see `aggregation_weights`. kl_estimator: see `kl_penalty`. kl_place: the penalty
    against the reference model is a part of the reward or of the loss, if `kl_coef` > 0.
    """

    advantages: str
    policy_loss: str
    needs_groups: bool
    settings: str = "policy_gradient"
    aggregation: Aggregation = "token"
    truncated: Truncated = "zero"
    kl_estimator: KlEstimator = "k3"
    kl_place: KlPlace = "loss"

    @property
    def standardises_groups(self) -> bool:
        """True if each group's returns are divided by their standard deviation, even a tiny one."""
        return self.advantages == "grpo"


# the KL penalty is a part of the reward
_IN_REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_place": "reward"}

RECIPES: dict[str, Recipe] = {
    # DeepSeekMath, arXiv:2402.03300; token-mean over the global batch as in DAPO, arXiv:2503.14476
    "grpo": Recipe("grpo", "ppo_clip", needs_groups=True),
    # arXiv:2503.20783: no division by a standard deviation or a sequence's length
    "dr_grpo": Recipe("dr_grpo", "ppo_clip", needs_groups=True, aggregation="constant"),
    # arXiv:2503.14476
    "dapo": Recipe("grpo", "ppo_clip", needs_groups=True, settings="dynamic_sampling"),
    # arXiv:2507.18071: ratio and clip of whole sequences
    "gspo": Recipe(
        "grpo", "gspo", needs_groups=True, settings="sequence_ratio", aggregation="sequence"
    ),
    # arXiv:2506.13585: the importance weight is clipped, and every token keeps its gradient
    "cispo": Recipe("grpo", "cispo", needs_groups=True, settings="clipped_weight"),
    # arXiv:2402.14740
    "rloo": Recipe("rloo", "ppo_clip", needs_groups=True, **_IN_REWARD),
    # arXiv:2501.03262
    "reinforce++": Recipe(
        "reinforce++", "ppo_clip", needs_groups=False, settings="discounted", **_IN_REWARD
    ),
    "reinforce++-baseline": Recipe(
        "reinforce++-baseline", "ppo_clip", needs_groups=True, kl_estimator="k2"
    ),
    # arXiv:1707.06347, GAE arXiv:1506.02438, dual clip arXiv:1912.09729
    "ppo": Recipe("gae", "dual_clip", needs_groups=False, settings="actor_critic", **_IN_REWARD),
    # PPO with turns as time steps: an action is one decision, rewarded with the observation
    "turn_ppo": Recipe(
        "turn_gae", "dual_clip", needs_groups=False, settings="turn_actor_critic", **_IN_REWARD
    ),
    # more supervised learning on the demonstrations, to measure the gain of imitation alone
    "sft": Recipe("", "", needs_groups=False, settings="imitation"),
    # arXiv:2305.18290, pairs of trajectories of one item as in ETO, arXiv:2403.02502
    "dpo": Recipe("", "", needs_groups=True, settings="preference"),
    # arXiv:2406.04151
    "agent_evol": Recipe("", "", needs_groups=False, settings="self_training"),
}


def recipe_of(name: str) -> Recipe:
    """Return the recipe of this name from RECIPES, or from an installed package with an entry point
    in the group `agentgym.recipes`, which is then imported.
    Errors: ValueError for an unknown name or an entry point that is no Recipe; those of the import.
    """
    if name in RECIPES:
        return RECIPES[name]
    offered = _offered()
    if name not in offered:
        known = ", ".join(known_recipes())
        raise ValueError(f"algorithm.recipe {name!r} is unknown; known: {known}")
    recipe = offered[name].load()
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"algorithm.recipe {name}: {offered[name].value} is {type(recipe).__name__}, expected"
            " an agentgym.algorithms.recipe.Recipe"
        )
    return recipe


def recipe_modules(name: str) -> tuple[str, ...]:
    """Names of the modules of other packages that compute a recipe; empty for a row of RECIPES.
    Errors: as `recipe_of`.
    """
    if name in RECIPES:
        return ()
    recipe = recipe_of(name)
    texts = (recipe.advantages, recipe.policy_loss, recipe.settings)
    elsewhere = (text.partition(":")[0] for text in texts if ":" in text)
    return tuple(sorted({_offered()[name].module, *elsewhere}))


def known_recipes() -> tuple[str, ...]:
    """All valid names for `algorithm.recipe` on this machine, sorted."""
    return tuple(sorted({*RECIPES, *_offered()}))


def named(table: dict[str, Any], name: str) -> Any:
    """Return the entry of the table with this name, or the object `module:name` of another package.

    name: from a `Recipe`, which is code, never from a parameter file.
    Errors: ValueError if it is neither; ImportError or AttributeError for a missing object.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ValueError(
            f"a recipe names {name!r}, which is neither one of {', '.join(table)} nor module:name"
        )
    return pkgutil.resolve_name(name)


def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


REWARD_TOLERANCE = 1e-6  # a float32 sum keeps six digits; no environment gives smaller rewards


def differ(low: Any, high: Any) -> Any:
    """Return True if high is above low by more than rounding.

    low, high: floats, or tensors of one shape, for which the result is a bool tensor.
    The tolerance grows with the rewards as their rounding does: for rewards up to 1, 1e-6 to 3e-6.
    """
    return high - low > REWARD_TOLERANCE * (1 + abs(low) + abs(high))


def all_equal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group, at least one, are equal up to rounding."""
    return not differ(min(rewards), max(rewards))
