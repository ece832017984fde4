"""AgentGym's 40 levels, five seeds each: the expert solves them, and only success is rewarded."""

import asyncio
import random
from collections import Counter

import pytest

from envs.babyai import spec
from envs.babyai.levels import AGENTGYM_LEVELS
from envs.bounded import run_bounded
from envs.env import ExpertFailed

NUM_IDS = 5 * len(AGENTGYM_LEVELS)
# the README explains why
NEVER = {"KeyInBox", "PutNextS7N4Carrying"}
SELDOM = {"OpenDoorsOrderN4Debug", "UnlockToUnlock", "GoToImpUnlock"}


def play_expert(world, task_id):
    """Return "" if the expert succeeds within the level's step limit, else the reason."""
    world.reset(task_id)
    expert = world.expert()
    while True:
        try:
            result = world.step(asyncio.run(run_bounded(expert.next_action, 2.0)))
        except ExpertFailed as error:
            return str(error)[:60]
        except TimeoutError:
            return "no answer"
        if result.terminated or result.truncated:
            return "" if result.success and result.reward == 1.0 else "ended without success"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_expert_solves_every_level_but_those_the_readme_lists():
    world = spec({"levels": "agentgym"}).make()
    failures = {task_id: why for task_id in range(NUM_IDS) if (why := play_expert(world, task_id))}
    by_level = Counter(AGENTGYM_LEVELS[task_id % 40] for task_id in failures)
    print(f"solved {NUM_IDS - len(failures)} of {NUM_IDS}; not: {dict(by_level)}")
    assert by_level.keys() <= NEVER | SELDOM, {
        AGENTGYM_LEVELS[task % 40]: why for task, why in failures.items()
    }
    assert all(by_level[level] == 5 for level in NEVER)


@pytest.mark.parametrize("actions", ["low", "high"])
def test_junk_and_silence_are_paid_nothing_on_any_level(actions):
    world = spec({"levels": "agentgym", "actions": actions}).make()
    chance = random.Random(0)
    junk = [
        "",
        "   ",
        "win",
        "done",
        "answer",
        "go to",
        "pick up the moon",
        "toggle me",
        "\x00",
        "🤖",
        "forward!",
        '{"action": "left"}',
    ]
    for task_id in range(NUM_IDS):
        world.reset(task_id)
        for action in ["", *chance.sample(junk, 3)]:
            result = world.step(action)
            assert (result.reward, result.success, result.terminated) == (0.0, False, False)
