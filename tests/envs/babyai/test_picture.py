"""The agent's view equals minigrid's picture at every step of every level."""

import random

import numpy as np
import pytest
from minigrid.minigrid_env import MiniGridEnv

from envs.babyai.actions import Move
from envs.babyai.levels import make_level, registered


@pytest.mark.parametrize("first", range(8))
def test_the_picture_is_minigrids(first):
    dice = random.Random(first)
    carried = hidden = 0
    for level in sorted(registered())[first::8]:
        env = make_level(level)
        seen = env.reset(seed=first)[0]
        for _ in range(30):
            expected = MiniGridEnv.gen_obs(env)
            seen = env.gen_obs()
            assert np.array_equal(seen["image"], expected["image"])
            assert seen["image"].dtype == expected["image"].dtype
            assert {**seen, "image": 0} == {**expected, "image": 0}
            carried += env.carrying is not None
            hidden += (expected["image"][..., 0] == 0).any()
            env.step(dice.choice([*Move, Move.FORWARD, Move.FORWARD]))
        env.close()
    assert carried
    assert hidden
