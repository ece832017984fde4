"""The options of the environment, its manual and its metrics."""

import re
from pathlib import Path

import pytest

import envs.textcraft
from envs.textcraft import spec
from tests.envs.textcraft.test_world import solve, world_of


def test_the_figures_of_the_readme_are_those_of_the_recipes():
    readme = Path(envs.textcraft.__file__).with_name("README.md").read_text()
    world = world_of()
    book = world.book
    items = len(book.raw) + len(book.by_output)
    numbers = (len(book.recipes), len(book.goals), items, len(book.raw))
    assert re.search(r"\b" + r"\b\D*\b".join(map(str, numbers)) + r"\b", readme)
    start = 0
    for depth in range(1, 5):
        goals = [goal for goal in book.goals if book.depth[goal] == depth]
        turns = []
        for task_id in range(start, start + len(goals)):
            world.reset(task_id)
            turns.append(solve(world)[0])
        row = (
            depth,
            f"{start}-{start + len(goals) - 1}",
            len(goals),
            sorted(turns)[len(turns) // 2],
            max(turns),
        )
        assert "| " + " | ".join(map(str, row)) + " |" in readme
        start += len(goals)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_dept": 2}, "did you mean 'max_depth'"),
        ({"max_depth": "2"}, "expected a whole number from 0"),
        ({"min_depth": 0}, "from 1, got 0"),
        ({"distractors": -1}, "option distractors"),
        ({"max_steps": True}, "option max_steps"),
        ({"protocol": "agentgim"}, "option protocol: .* did you mean 'agentgym'"),
        ({"min_depth": 9}, "depths here go from 1 to 4"),
        ({"min_depth": 3, "max_depth": 2}, "no goal is left"),
        ({"goals": ["stik"]}, "did you mean 'stick'"),
        ({"goals": ["oak log"]}, "unknown crafted item 'oak log'"),
        ({"goals": "stick"}, "expected a list of items"),
        ({"recipes": "/no/such/folder"}, "no file or folder '/no/such/folder'"),
        ({"recipes": 3}, "expected text"),
        ({"digest": "0" * 16}, "other recipes, other tasks"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as refused:
        spec(options)
    assert "\n" not in str(refused.value)


def test_a_digest_pins_the_recipes():
    served = spec({}).options
    assert spec(served).options == served


def test_the_manual_agrees_with_the_grammar():
    instructions = spec({}).instructions
    world = world_of(goals=["chest"])
    world.reset(0)
    for example, observation in (
        ("get 2 oak log", "Got 2 oak log"),
        ("craft 4 oak planks using 1 oak log", "Crafted 4 minecraft:oak_planks"),
        ("craft 4 stick using 2 oak planks", "Crafted 4 minecraft:stick"),
    ):
        assert example in instructions
        assert world.step(example).observation == observation
    assert "\ninventory - " in instructions
