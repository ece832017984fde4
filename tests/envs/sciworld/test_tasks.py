import json

import pytest

from envs.env import UnknownTask
from envs.sciworld.jvm import find_engine
from envs.sciworld.tasks import PUBLISHED, VARIATIONS, find_task, num_tasks

# first index of each kind of task in the published lists
FIRST = {
    "boil": 0,
    "melt": 30,
    "freeze": 60,
    "change-the-state-of-matter-of": 90,
    "use-thermometer": 120,
    "measure-melting-point-known-substance": 660,
    "measure-melting-point-unknown-substance": 1096,
    "power-component": 1396,
    "power-component-renewable-vs-nonrenewable-energy": 1416,
    "test-conductivity": 1436,
    "test-conductivity-of-unknown-substances": 2336,
    "find-living-thing": 2936,
    "find-non-living-thing": 3236,
    "find-plant": 3536,
    "find-animal": 3836,
    "chemistry-mix": 4136,
    "chemistry-mix-paint-secondary-color": 4168,
    "chemistry-mix-paint-tertiary-color": 4204,
    "lifespan-longest-lived": 4240,
    "lifespan-shortest-lived": 4365,
    "lifespan-longest-lived-then-shortest-lived": 4490,
    "identify-life-stages-1": 4615,
    "identify-life-stages-2": 4629,
}


def test_indices_mean_what_the_published_lists_mean():
    assert list(FIRST) == list(PUBLISHED)
    for name, index in FIRST.items():
        task = find_task(PUBLISHED, index)
        assert (task.name, task.variation) == (name, 0)
        if index:
            assert find_task(PUBLISHED, index - 1).variation > 0  # the previous kind's last one
    assert num_tasks(PUBLISHED) == 4639


def test_an_index_beyond_the_last_is_refused_with_the_range():
    with pytest.raises(
        UnknownTask, match=r"sciworld task 4639: these 23 kinds of task have the indices 0 to 4638"
    ):
        find_task(PUBLISHED, 4639)


def test_the_table_is_the_engines(pool):
    names = [
        task["task_name"] for task in json.loads(find_engine().with_name("tasks.json").read_text())
    ]
    assert names == list(VARIATIONS)
    slot = pool.acquire()
    assert [int(text) for text in slot.call("v", *names)] == list(VARIATIONS.values())
    pool.release(slot)
