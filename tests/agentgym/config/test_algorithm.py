"""Each recipe has settings of its own."""

import re

import pytest

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import ConfigError, algorithm_config, load_config, settings


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_settings_a_recipe_brings_are_not_refused(recipe):
    assert algorithm_config(recipe=recipe).recipe == recipe


@pytest.mark.parametrize(
    "setting",
    [
        {"recipe": "rloo", "kl_coef": 0.01},
        {"recipe": "dr_grpo", "kl_coef": 0.01, "kl_place": "reward", "kl_estimator": "k1"},
        {"recipe": "ppo", "kl_coef": 0.01, "kl_place": "loss", "kl_estimator": "k3"},
    ],
)
def test_kl_where_it_belongs_is_not_refused(setting):
    assert algorithm_config(**setting).kl_coef == 0.01


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.gamma=0.9"], "algorithm.gamma means nothing to recipe grpo; its settings: ag"),
        (["algorithm.recipe=sft", "algorithm.epochs=2"], "recipe sft; its settings: none"),
        (["algorithm.recipe=gspo", "algorithm.dual_clip=2"], "means nothing to recipe gspo"),
        (
            ["algorithm.clip_lo=0.1"],
            "unknown key algorithm.clip_lo; did you mean algorithm.clip_low?",
        ),
        (["algorithm.importance_floor=0.5"], "means nothing to correction token_truncate"),
        (
            ["algorithm.correction=token_mask", "algorithm.importance_floor=3"],
            "importance_floor 3 must be below importance_cap 2",
        ),
        (
            ["algorithm.recipe=ppo", "algorithm.turn_rewards=true", "algorithm.shuffle_rewards=1"],
            "shuffle_rewards deals outcomes of whole episodes",
        ),
        (["algorithm.recipe=dpo", "algorithm.truncated=bootstrap"], "and recipe dpo has none"),
    ],
)
def test_a_setting_that_means_nothing_to_a_recipe_is_refused_with_the_recipes_own(
    overrides, expected
):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(overrides=overrides)


def test_settings_written_for_one_recipe_go_along_to_another_where_they_mean_the_same(write):
    file = write("{algorithm: {recipe: ppo, gamma: 0.9, clip_low: 0.1, epochs: 3, value_clip: 9}}")
    gspo = load_config(file, ["algorithm.recipe=gspo"]).algorithm
    assert (gspo.epochs, gspo.clip_low) == (3, 3e-4)  # gspo clips sequence ratios
    discounted = load_config(file, ["algorithm.recipe=reinforce++"]).algorithm
    assert (discounted.gamma, discounted.clip_low) == (0.9, 0.1)
    layer = {"algorithm": {"recipe": "sft"}}
    assert load_config(file, layers=[layer]).algorithm.model_dump() == {"recipe": "sft"}
    # settings given with the recipe, or on the command line in any order, apply to that recipe
    with pytest.raises(ConfigError, match="value_clip means nothing to recipe sft"):
        load_config(file, layers=[{"algorithm": {"recipe": "sft", "value_clip": 9}}])
    with pytest.raises(ConfigError, match="value_clip means nothing to recipe sft"):
        load_config(file, ["algorithm.value_clip=9", "algorithm.recipe=sft"])
    own = load_config(file, ["algorithm.clip_low=1e-3", "algorithm.recipe=gspo"]).algorithm
    assert own.clip_low == 1e-3


def test_the_command_lists_the_settings_of_the_recipe_in_use(write):
    listed = {each.name: each for each in settings(load_config(write("algorithm: {recipe: gspo}")))}
    assert (listed["recipe"].value, listed["recipe"].default) == ("gspo", "grpo")
    assert listed["clip_low"].value == listed["clip_low"].default == 3e-4
    assert "gamma" not in listed
