"""The recorded solutions solve every kind of task, and only success is rewarded."""

import random
from collections import Counter

import pytest

from envs.sciworld.gold import solution
from envs.sciworld.tasks import PUBLISHED, VARIATIONS, Task, find_task, num_tasks

UNSOLVED_SHARE = 0.01  # upper bound over all indices; the README lists the kinds


def play(world, task_id):
    """Return (final score, moves) of the expert."""
    world.reset(task_id)
    expert = world.expert()
    while True:
        result = world.step(expert.next_action())
        if result.terminated or result.truncated:
            return result.info["score"], result.info["moves"]


def ids(per_task):
    """Return ids of tasks with a recorded solution, spread over the variations of each kind."""
    first, chosen = 0, []
    for name in PUBLISHED:
        count = VARIATIONS[name]
        spread = [count * k // per_task for k in range(min(per_task, count))]
        chosen += [first + v for v in spread if solution(Task(name, v))]
        first += count
    return chosen


def check(world, per_task):
    playing = world(max_moves=10_000)
    chosen = ids(per_task)
    assert len({find_task(PUBLISHED, task_id).name for task_id in chosen}) == 23
    scores = {task_id: play(playing, task_id)[0] for task_id in chosen}
    print(f"solved {sum(score == 100 for score in scores.values())} of {len(scores)}")
    assert all(score == 100 for score in scores.values()), {
        find_task(PUBLISHED, i): s for i, s in scores.items() if s != 100
    }
    return len(scores)


@pytest.mark.slow
def test_the_expert_solves_every_kind_of_task(world):
    assert check(world, 1) == 23


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_expert_solves_nine_of_every_kind(world):
    assert check(world, 9) >= 200


def test_nearly_every_index_has_a_recorded_solution():
    tasks = [find_task(PUBLISHED, index) for index in range(num_tasks(PUBLISHED))]
    missing = Counter(task.name for task in tasks if not solution(task))
    print(f"{len(tasks) - missing.total()} of {len(tasks)} recorded; missing: {dict(missing)}")
    assert missing.total() <= UNSOLVED_SHARE * len(tasks)


@pytest.mark.slow
def test_junk_earns_next_to_nothing(world):
    playing = world()
    chance = random.Random(0)
    junk = [
        "",
        "win",
        "score 100",
        "focus",
        "go to moon",
        "take all",
        "look around",
        "inventory",
        "wait1",
        "answer",
        "open",
        "use it",
        "🤖",
    ]
    totals = []
    for task_id in ids(3)[::3]:
        playing.reset(task_id)
        totals.append(sum(playing.step(chance.choice(junk)).reward for _ in range(8)))
    print(f"junk earns {sum(totals) / len(totals):.3f} on average, at most {max(totals):.2f}")
    assert sum(totals) / len(totals) <= 0.1
