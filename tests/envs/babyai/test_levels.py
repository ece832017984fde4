"""Task ids map to a level, a seed and a world."""

import json

import numpy as np
import pytest

from envs.babyai import spec
from envs.babyai.levels import AGENTGYM_LEVELS, begin, make_level, pick_level
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


@pytest.mark.parametrize("name", ["PutNextS7N4Carrying", "KeyInBox", "BossLevel"])
def test_samples_of_an_item_begin_in_copies_of_one_world(name):
    def played(level):
        seen = [level.gen_obs()["image"].tobytes(), level.mission]
        for move in (2, 1, 3, 2, 5, 0, 2, 4, 6):
            observation, reward, *ends, _ = level.step(move)
            seen += [observation["image"].tobytes(), reward, ends, level.carrying is None]
        return seen, level.render().tobytes()

    made = make_level(name)
    image = made.reset(seed=5)[0]["image"]
    level, first = begin(name, 5)
    assert played(level) == played(made)
    again, second = begin(name, 5)  # not what was played
    assert np.array_equal(first, image)
    assert np.array_equal(second, image)
    assert played(again) == played(begin(name, 5)[0])
