"""Whole TextCraft episodes on the included recipes."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.textcraft
from envs.textcraft import spec
from envs.textcraft.world import ECHO_CHARS, normalise
from tests.completed import printed_under

EXPECTED = (
    "\nExpected: get <number> <item> | craft <number> <item> using <number> <item>, <number> <item>"
    " | inventory"
)


def world_of(**options):
    return spec(options).make()


def play(world, *actions):
    """Return the result of the last action."""
    for action in actions:
        result = world.step(action)
    return result


def solve(world, max_turns=60):
    """Play the expert. Return (turns, last result)."""
    expert = world.expert()
    for turn in range(1, max_turns + 1):
        result = world.step(expert.next_action())
        assert not result.observation.startswith(("Could not", "Wrong"))
        if result.terminated:
            return turn, result
    raise AssertionError(f"{world.goal} not crafted in {max_turns} turns")


def test_the_expert_crafts_every_goal_and_is_paid_one():
    world = world_of()
    longest = {}
    for task_id in range(len(world.options.goals)):
        world.reset(task_id)
        turns, result = solve(world)
        assert (result.reward, result.success, result.truncated) == (1.0, True, False)
        depth = world.book.depth[world.goal]
        assert turns > depth
        longest[depth] = max(turns, longest.get(depth, 0))
    assert longest == {1: 4, 2: 11, 3: 48, 4: 27}


def test_junk_and_silence_are_never_paid():
    world = world_of()
    for task_id in range(0, 547, 2):
        world.reset(task_id)
        for action in (
            "",
            "get 1 diamond",
            f"get 1 {world.goal}",
            f"craft 1 {world.goal} using 1 diamond",
            f"craft {world.goal}",
            "open sesame",
        ):
            result = world.step(action)
            assert (result.reward, result.terminated, result.success) == (0.0, False, False)
        assert world.inventory in ({}, {"diamond": 1})


def test_an_episode_as_the_readme_tells_it():
    readme = Path(envs.textcraft.__file__).with_name("README.md").read_text()
    told = re.search(r"```text\n(.*?)```", readme, re.S)[1]
    first, *turns = told.split("\n> ")
    world = world_of(goals=["loom"], distractors=3)
    assert world.reset(0) == first
    for turn in turns:
        action, _, observation = turn.rstrip("\n").partition("\n")
        result = world.step(action)
        assert result.observation == observation
    assert result.success


def test_ingredients_are_exact_and_the_stated_amount_is_not_looked_at():
    world = world_of(goals=["lever"])
    world.reset(0)
    play(world, "get 9 cobblestone", "get 4 bamboo", "craft 7 stick using 2 bamboo")
    assert world.inventory == {"cobblestone": 9, "bamboo": 2, "stick": 1}
    for wrong in (
        "2 cobblestone, 1 stick",
        "1 cobblestone",
        "1 cobblestone, 1 stick, 1 bamboo",
        "1 stick, 1 stick",
        "1 bamboo, 1 stick",
    ):
        refused = world.step(f"craft 1 lever using {wrong}")
        assert refused.observation.startswith(
            ("Could not find a valid recipe for lever using", "Could not find enough items")
        )
        assert refused.reward == 0
    assert world.inventory == {"cobblestone": 9, "bamboo": 2, "stick": 1}
    result = world.step("craft lever using 1 stick, 1 cobblestone")
    assert (result.observation, result.reward, result.terminated) == (
        "Crafted 1 minecraft:lever",
        1.0,
        True,
    )
    assert world.inventory == {"cobblestone": 8, "bamboo": 2, "lever": 1}


def test_a_kind_is_filled_by_any_of_its_members_even_mixed_and_by_nothing_else():
    world = world_of(goals=["chest"])
    world.reset(0)
    play(world, "get 2 oak log", "get 1 birch log", "get 8 bamboo")
    play(
        world,
        "craft oak planks using 1 oak log",
        "craft oak planks using 1 oak log",
        "craft birch planks using 1 birch log",
    )
    # a kind is not an item
    assert "not find enough" in world.step("craft 1 chest using 8 planks").observation
    assert "not find a valid recipe" in world.step("craft 1 chest using 8 bamboo").observation
    assert (
        "not find a valid recipe"
        in world.step("craft 1 chest using 6 oak planks, 1 birch planks").observation
    )
    assert play(world, "craft 1 chest using 5 oak planks, 3 birch planks").success


def test_two_kinds_in_one_recipe_are_told_apart():
    world = world_of(goals=["barrel"])
    world.reset(0)
    play(
        world,
        *[
            "get 2 oak log",
            "craft oak planks using 1 oak log",
            "craft oak planks using 1 oak log",
            "get 1 warped stem",
        ],
    )
    play(
        world, "craft warped planks using 1 warped stem", "craft warped slab using 3 warped planks"
    )
    assert "valid recipe" in world.step("craft barrel using 8 oak planks").observation
    assert (
        "valid recipe" in world.step("craft barrel using 2 oak planks, 6 warped slab").observation
    )
    assert play(world, "craft barrel using 2 warped slab, 6 oak planks").success


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("get 3 oak log", "Got 3 oak log"),
        ("  GET 3 Minecraft:Oak_Log. ", "Got 3 oak log"),
        ("get 1 oak planks", "Could not find oak planks"),  # an item that must be crafted
        ("get 1 planks", "Could not find planks"),  # a kind of items
        ("get 1 unobtainium", "Could not find unobtainium"),
        ("get 0 oak log", "Could not execute get 0 oak log" + EXPECTED),
        ("get -1 oak log", "Could not execute get -1 oak log" + EXPECTED),
        (
            "get ٣ oak log",
            "Could not execute get ٣ oak log" + EXPECTED,
        ),  # a digit of another script
        ("get oak log", "Could not execute get oak log" + EXPECTED),
        ("", "Could not execute " + EXPECTED),
        ("inventory", "Inventory: You are not carrying anything."),
        ("inventory now", "Inventory: You are not carrying anything."),
        ("craft 1 lever", "Could not extract recipe from craft 1 lever" + EXPECTED),
        ("craft 1 lever using stick", "Wrong item format: stick" + EXPECTED),
        ("craft 1 lever using 1 stick,", "Wrong item format: " + EXPECTED),
        ("craft 1 lever using 0 stick", "Wrong item format: 0 stick" + EXPECTED),
        (
            "craft 1 lever using 1 cobblestone, 1 stick",
            "Could not find enough items to craft minecraft:lever",
        ),
        ("x" * 5000, "Could not execute " + "x" * ECHO_CHARS + "..." + EXPECTED),
        (
            "craft 1 a using " + "1 b, " * 3000,
            "Could not extract recipe from craft 1 a using 1 b, ",
        ),
    ],
)
def test_every_text_gets_an_answer_that_says_what_came_of_it(action, observation):
    world = world_of()
    world.reset(0)
    told = world.step(action).observation
    assert told == observation or (len(action) > 10_000 and told.startswith(observation))
    assert len(told) < 400


def test_under_agentgyms_protocol_a_malformed_action_is_answered_as_there():
    texts = {
        "open sesame": "Could not execute open sesame",
        "craft 1 a using b": "Wrong item format: b",
    }
    world, served = world_of(protocol="agentgym"), spec({}).agentgym.make()
    for each in (world, served):
        each.reset(0)
        assert {text: each.step(text).observation for text in texts} == texts


@settings(max_examples=400, deadline=None)
@given(
    texts=st.lists(
        st.one_of(
            st.text(max_size=60),
            st.from_regex(
                r"(get|craft|inventory) ?[0-9]{0,7} ?(stick|oak_log|planks|)( using ([0-9]{0,3}"
                r" ?[a-z ,]{0,12})*)?"
            ),
            st.sampled_from(
                [
                    "get 9 oak log",
                    "craft 4 oak planks using 1 oak log",
                    "craft 4 stick using 2 oak planks",
                ]
            ),
        ),
        max_size=10,
    )
)
def test_no_text_raises_and_no_inventory_goes_below_zero(texts):
    world = world_of(goals=["stick"])
    world.reset(0)
    for text in texts:
        result = world.step(text)
        assert result.observation or not text
        assert all(n > 0 for n in world.inventory.values())
        assert result.success == ("stick" in world.inventory)
        if result.terminated:
            break


def test_the_episode_is_over_once_the_goal_was_crafted():
    world = world_of(goals=["stick"])
    world.reset(0)
    assert play(world, "get 2 bamboo", "craft 1 stick using 2 bamboo").terminated
    with pytest.raises(AssertionError):
        world.step("inventory")


def test_a_step_limit_truncates_but_takes_no_success_away():
    world = world_of(goals=["stick"], max_steps=2)
    world.reset(0)
    results = [world.step("inventory"), world.step("inventory")]
    assert [(result.truncated, result.terminated) for result in results] == [
        (False, False),
        (True, False),
    ]
    world.reset(0)
    result = play(world, "get 2 bamboo", "craft 1 stick using 2 bamboo")
    assert (result.truncated, result.terminated, result.reward) == (False, True, 1.0)
    assert len(spec({"max_steps": 2}).probe_actions) == 2


def commands_of(observation):
    return (
        observation.removeprefix("Crafting commands:\n")
        .partition("\n\nGoal: craft ")[0]
        .split("\n")
    )


def test_distractors_use_what_the_tree_uses_and_never_help():
    tree = {
        "craft 1 lever using 1 cobblestone, 1 stick",
        "craft 1 stick using 2 bamboo",
        "craft 4 stick using 2 planks",
    }
    planks = ("acacia", "birch", "crimson", "dark oak", "jungle", "oak", "spruce", "warped")
    tree |= {
        f"craft 4 {wood} planks using 1 {wood} {'stem' if wood in ('crimson', 'warped') else 'log'}"
        for wood in planks
    }
    drawn = set()
    for task_id in range(30):
        commands = commands_of(world_of(goals=["lever"]).reset(task_id))
        assert len(commands) == len(set(commands)) == len(tree) + 10
        others = set(commands) - tree
        assert len(others) == 10
        assert all(
            re.search(r"using .*\b(cobblestone|stick|planks|bamboo|log|stem)\b", command)
            for command in others
        )
        drawn |= others
    assert len(drawn) > 50
    assert set(commands_of(world_of(goals=["lever"], distractors=0).reset(5))) == tree
    # only three other recipes use wheat
    assert len(commands_of(world_of(goals=["bread"]).reset(0))) == 1 + 3


def test_depths_choose_the_goals():
    counts = {
        depth: len(world_of(min_depth=depth, max_depth=depth).options.goals)
        for depth in (1, 2, 3, 4)
    }
    assert counts == {1: 124, 2: 293, 3: 119, 4: 11}
    assert len(world_of(min_depth=3).options.goals) == 130
    goals = world_of().options.goals
    assert len(goals) == 547
    book = world_of().book
    assert [(book.depth[goal], goal) for goal in goals] == sorted(
        (book.depth[goal], goal) for goal in goals
    )
    world = world_of(max_depth=1)
    world.reset(124 + 7)
    assert world.goal == goals[7]


def test_goals_by_name_keep_the_books_order():
    assert world_of(goals=["loom", "oak_planks", "lever"]).options.goals == (
        "oak planks",
        "lever",
        "loom",
    )


TRANSCRIPT = """
import hashlib
from envs.textcraft import spec
digest = hashlib.sha256()
made = spec({})
worlds = {}
for task_id in range(0, 1640, 7):
    worlds[task_id] = made.make()
    digest.update(worlds[task_id].reset(task_id).encode())
experts = {task_id: world.expert() for task_id, world in worlds.items()}
while experts:
    for task_id in list(experts):
        action = experts[task_id].next_action()
        result = worlds[task_id].step(action)
        digest.update(f"{task_id} {action} {result.observation} {result.reward}".encode())
        if result.terminated:
            digest.update(worlds[task_id].render()[1])
            del experts[task_id]
print(digest.hexdigest())
"""


def test_interleaved_episodes_are_the_same_in_two_processes():
    first = printed_under("1", TRANSCRIPT)
    assert len(first.strip()) == 64
    assert first == printed_under("4711", TRANSCRIPT)


def test_an_episode_does_not_depend_on_other_sessions():
    made = spec({})
    alone = made.make()
    expected = [alone.reset(task_id) for task_id in range(50)]
    used, other = made.make(), made.make()
    for task_id in range(50):
        other.reset(task_id * 3)
        assert used.reset(task_id) == expected[task_id]
        play(other, "get 1 stone", "inventory")
        assert used.step("inventory").observation == "Inventory: You are not carrying anything."
    assert made.make().reset(3) != made.make().reset(3 + 547)  # the same goal with other commands
    assert (
        made.make().reset(3).partition("Goal")[2] == made.make().reset(3 + 547).partition("Goal")[2]
    )


def test_a_picture_in_words_shows_what_is_held_and_what_is_missing():
    world = world_of(goals=["loom"])
    world.reset(0)
    play(world, "get 1 oak log", "craft oak planks using 1 oak log", "get 1 string")
    media_type, data = world.render()
    assert media_type == "text/plain"
    assert data.decode().split("\n") == [
        "Goal: loom (depth 2), 3 steps taken",
        "Inventory: [oak planks] (4) [string] (1)",
        "",
        "1 loom: craft 1 loom using 2 planks, 2 string",
        "  2 oak planks (any planks): held",
        "  2 string, 1 held: get 1 string",
    ]


def test_spelling_is_forgiven():
    assert (
        normalise(" Craft 1\tMinecraft:Oak_Planks  using 1 oak log . ")
        == "craft 1 oak planks using 1 oak log"
    )


def test_every_turn_tells_the_depth_of_the_goal_and_what_changed_nothing():
    world = world_of(goals=["stick", "loom"])
    for task_id, goal in enumerate(world.options.goals):
        world.reset(task_id)
        done = ["inventory", "get 1 oak log", "craft 4 oak planks using 1 oak log"]
        refused = ["", "get 1 loom", "craft 1 loom using 2 string", "craft 1 loom using string"]
        told = [world.step(action).info for action in (*done, *refused, "x" * 2000)]
        assert {each["family"] for each in told} == {f"depth {world.book.depth[goal]}"}
        assert [each.get("invalid", False) for each in told] == [False] * 3 + [True] * 5
