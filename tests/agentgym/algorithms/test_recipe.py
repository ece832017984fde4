"""Tests for built-in and installed recipes, and for comparing rewards up to rounding."""

import pytest
import torch

from agentgym.algorithms.recipe import (
    ENTRY_POINT_GROUP,
    RECIPES,
    Recipe,
    all_equal,
    differ,
    known_recipes,
    named,
    recipe_modules,
    recipe_of,
)

SOURCE = """
from agentgym.algorithms.recipe import Recipe
MINE = Recipe("mine_recipe:advantages", "ppo_clip", needs_groups=False)
NONE = {"advantages": "grpo"}
def advantages(experience): return experience
"""


def test_a_row_of_ours_needs_no_other_package():
    assert recipe_of("grpo") is RECIPES["grpo"]
    assert recipe_modules("grpo") == ()
    assert [name for name, row in RECIPES.items() if row.standardises_groups] == [
        "grpo",
        "dapo",
        "gspo",
        "cispo",
    ]


def test_an_installed_recipe_is_known_with_the_modules_that_compute_it(install):
    install("mine_recipe", SOURCE, ENTRY_POINT_GROUP, "mine", "mine_recipe:MINE")
    assert "mine" in known_recipes()
    assert recipe_of("mine") == Recipe("mine_recipe:advantages", "ppo_clip", needs_groups=False)
    assert recipe_modules("mine") == ("mine_recipe",)
    assert named({}, "mine_recipe:advantages")(7) == 7


def test_what_is_no_recipe_is_refused_with_its_place(install):
    install("mine_recipe", SOURCE, ENTRY_POINT_GROUP, "none", "mine_recipe:NONE")
    with pytest.raises(ValueError, match=r"algorithm\.recipe none: mine_recipe:NONE is dict"):
        recipe_of("none")


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match="'gpro' is unknown; known: agent_evol, cispo, dapo"):
        recipe_of("gpro")
    assert named({"a": 1}, "a") == 1
    with pytest.raises(ValueError, match="'b', which is neither one of a, c nor module:name"):
        named({"a": 1, "c": 2}, "b")


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.0, 1.0, True),
        (0.0, 1e-6, False),  # the tolerance at 0
        (0.0, 2e-6, True),
        (1.0, 1.0 + 2e-6, False),  # at 1 the tolerance is 3e-6
        (1.0, 1.0 + 4e-6, True),
        (1000.0, 1000.001, False),  # the rounding error of a float32 sum near 1000 is larger
        (-1.0, 1.0, True),
        (1.0, 0.0, False),  # high must exceed low
    ],
)
def test_a_difference_is_more_than_the_rounding_of_what_is_compared(low, high, told):
    assert differ(low, high) == told
    assert bool(differ(torch.tensor(low).double(), torch.tensor(high).double())) == told


def test_a_group_carries_a_signal_where_its_extremes_differ():
    assert all_equal([0.5])
    assert all_equal([1.0, 1.0 + 1e-7, 1.0])
    assert not all_equal([1.0, 1.0, 0.0])
