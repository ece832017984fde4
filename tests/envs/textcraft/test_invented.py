"""Invented recipes."""

import pytest

from envs.textcraft import spec
from envs.textcraft.recipes import load_book


def test_invented_recipes_leave_the_shipped_ones_as_they_are_and_can_all_be_crafted():
    shipped, book, fewer = load_book(), load_book("invented:500"), load_book("invented:100")
    invented = [recipe for recipe in book.recipes if recipe.output not in shipped.by_output]
    assert len(invented) == len({recipe.output for recipe in invented}) == 500
    assert invented[:100] == [
        recipe for recipe in fewer.recipes if recipe.output not in shipped.by_output
    ]
    assert {book.depth[recipe.output] for recipe in invented} == {1}
    assert all(book.told(goal) == shipped.told(goal) for goal in shipped.goals)
    words = {word for name in (*shipped.by_output, *shipped.raw) for word in name.split()}
    assert all(
        set(name.split()) <= words
        for recipe in invented
        for name in (recipe.output, *dict(recipe.ingredients))
    )
    world = spec({"recipes": "invented:500", "max_depth": 1}).make()
    for task_id in range(0, 624, 25):
        world.reset(task_id)
        expert = world.expert()
        while not (result := world.step(expert.next_action())).terminated:
            assert world.num_steps < 5
        assert result.success


@pytest.mark.parametrize("number", ["", "0", "many", "20001", "-3", "1 "])
def test_a_wrong_number_of_invented_recipes_is_told(number):
    with pytest.raises(
        ValueError, match="expected invented:N with N from 1 to 20000, got 'invented:"
    ):
        spec({"recipes": f"invented:{number}"})
