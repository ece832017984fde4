"""The expert's plans, compared with plans made by hand and with every other choice of recipes."""

import itertools

import pytest

from envs.textcraft import solution, spec
from envs.textcraft.invented import Draft
from envs.textcraft.planner import Choices, Plan
from envs.textcraft.recipes import Book, load_book


def draft(text, kind=""):
    """Parse a recipe such as `4 stick: 2 #planks`."""
    output, _, ingredients = text.partition(": ")
    count, name = output.split()
    return Draft(
        name,
        int(count),
        tuple((part.split()[1], int(part.split()[0])) for part in ingredients.split(", ")),
        kind,
    )


def book_of(*drafts):
    return Book([each if isinstance(each, Draft) else draft(each) for each in drafts], "test")


def test_everything_is_made_before_it_is_used_and_fetched_at_once():
    book = book_of("1 door: 2 bar, 1 pin", "3 bar: 2 iron", "1 pin: 1 iron, 1 bar")
    assert solution(book, "door") == [
        "get 3 iron",  # 2 for three bars, 1 for the pin
        "craft 3 bar using 2 iron",
        "craft 1 pin using 1 iron, 1 bar",  # uses the third bar
        "craft 1 door using 2 bar, 1 pin",
    ]


def test_one_craft_is_one_action_however_many_are_needed():
    book = book_of("1 wall: 5 brick", "2 brick: 3 clay")
    assert solution(book, "wall") == [
        "get 9 clay",
        *["craft 2 brick using 3 clay"] * 3,
        "craft 1 wall using 5 brick",
    ]


def test_the_recipe_and_the_member_that_save_turns_are_taken():
    woods = [draft("4 ash_planks: 1 ash", "planks"), draft("4 yew_planks: 1 yew", "planks")]
    book = book_of(
        *woods,
        "4 stick: 2 #planks",
        "1 stick: 2 bamboo",
        "1 sign: 6 yew_planks, 1 stick",
        "1 pole: 1 stick",
    )
    assert solution(book, "sign") == [
        "get 2 yew",
        "craft 4 yew planks using 1 yew",
        "craft 4 yew planks using 1 yew",
        "craft 4 stick using 2 yew planks",
        "craft 1 sign using 6 yew planks, 1 stick",
    ]
    assert solution(book, "pole") == [
        "get 2 bamboo",
        "craft 1 stick using 2 bamboo",
        "craft 1 pole using 1 stick",
    ]


def test_a_member_that_is_held_is_used_up_first():
    woods = [draft("4 ash_planks: 1 ash", "planks"), draft("4 yew_planks: 1 yew", "planks")]
    book = book_of(*woods, "1 chest: 8 #planks", "1 box: 3 #planks")
    world = spec({"goals": ["bowl"]}).make()
    world.book, world.goal = book, "box"
    expert = world.expert()
    assert expert.next_action() == "get 1 ash"
    world.inventory["yew planks"] = 3
    assert expert.next_action() == "craft 1 box using 3 yew planks"


def test_no_other_choice_of_recipes_and_members_is_shorter_on_any_goal():
    book = load_book()
    compared = 0
    for goal in book.goals:
        names = [goal]
        for name in names:  # the list grows while we iterate, up to the whole tree
            below = [
                part for recipe in book.by_output.get(name, ()) for part, _ in recipe.ingredients
            ]
            names += [
                part
                for part in dict.fromkeys([*below, *book.members.get(name, ())])
                if part not in names
            ]
        recipes = [name for name in names if len(book.by_output.get(name, ())) > 1]
        kinds = [name for name in names if name in book.members]
        ways = [book.by_output[name] for name in recipes] + [
            sorted(book.members[kind]) for kind in kinds
        ]
        combinations = list(itertools.islice(itertools.product(*ways), 1500))
        if len(combinations) == 1500:
            continue
        compared += 1
        shortest = len(solution(book, goal))
        for chosen in combinations:
            choices = Choices(
                book,
                dict(zip(recipes, chosen, strict=False)),
                dict(zip(kinds, chosen[len(recipes) :], strict=True)),
            )
            assert shortest <= len(Plan(goal, {}, choices).acts)
    assert compared == 544  # all but three goals, where too many dyes lead to too many flowers


@pytest.mark.parametrize("seed", range(3))
def test_the_expert_repeats_itself_and_recovers_from_acts_that_were_not_its_own(seed):
    world = spec({"min_depth": 2}).make()
    foreign = [
        "get 3 oak log",
        "craft 4 oak planks using 1 oak log",
        "craft 4 stick using 2 oak planks",
        "get 1 junk",
        "get 5 string",
    ]
    for task_id in range(seed, 423, 20):
        world.reset(task_id)
        expert = world.expert()
        for turn in range(90):
            advice = expert.next_action()
            assert advice == expert.next_action()
            result = world.step(foreign[(turn + seed) % 5] if turn % 3 == 1 else advice)
            if result.terminated:
                break
        assert result.success, world.goal


def test_an_expert_asked_in_the_middle_goes_on_from_what_is_held():
    world = spec({"goals": ["ladder"]}).make()
    world.reset(0)
    for action in ("get 9 bamboo", "get 1 oak log", "craft 4 oak planks using 1 oak log"):
        world.step(action)
    expert = world.expert()
    actions = []
    while not world.step(action := expert.next_action()).terminated:
        actions.append(action)
    assert [*actions, action] == [
        *["craft 4 stick using 2 oak planks"] * 2,
        "craft 3 ladder using 7 stick",
    ]
