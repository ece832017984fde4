"""Task ids map to a level, a seed and a world."""

import json

from envs.babyai import spec
from envs.babyai.levels import AGENTGYM_LEVELS, make_level, pick_level
from tests.envs.babyai.test_world import play, world_of


def test_ids_of_one_identity_are_one_world_to_whoever_plays_it():
    own, world = spec({}), world_of()
    walk = ["turn left", "move forward", "turn right", "move forward", "pickup", "drop"] * 3
    assert own.identity(53) == own.identity(135)
    assert play(world, 53, walk) == play(world, 135, walk)
    assert len({own.identity(task) for task in range(40)}) == 40


def test_what_a_box_hides_and_what_is_carried_belong_to_a_world():
    def of(level):
        return [json.loads(spec({"levels": [level]}).identity(task)) for task in range(3)]

    # the world contains a key in a box
    assert all(
        any(cell and cell[:1] == [7] and cell[3][:1] == [5] for cell in cells)
        for *_, cells in of("KeyInBox")
    )
    assert all(agent[-1] is not None for _, _, _, agent, _ in of("PutNextS7N4Carrying"))


def test_the_40_levels_of_agentgym_exist_and_reset_and_take_junk():
    world = world_of(levels="agentgym", view="agentgym", actions="high")
    for task_id in (*range(40), 40 * 7 + 6):
        first = world.reset(task_id)
        assert first.startswith("Your goal: ")
        assert 'Available actions: ["turn left", "turn right"' in first
        for action in (
            "check available actions",
            "go to red ball 1",
            "blub",
            "move forward",
            "pickup grey key 1",
            "drop",
        ):
            result = world.step(action)
            if result.terminated:
                break
    assert pick_level(AGENTGYM_LEVELS, 40 * 7 + 6) == ("GoToImpUnlock", 7)


def test_the_withdrawn_level_is_the_room_its_ids_were_made_with():
    level = make_level("GoToObjS6-v0")
    level.reset(seed=0)
    assert (level.room_size, level.max_steps) == (4, 16)


def test_levels_reject_layouts_in_silence(capfd):
    world = world_of(levels=["GoToObjDoor", "GoToSeqS5R2", "Unlock"])
    for task_id in range(30):
        world.reset(task_id)
    assert capfd.readouterr().out == ""
