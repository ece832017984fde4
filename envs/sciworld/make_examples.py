"""Script that writes `examples.json`: two tasks that are in no shipped list, played by the expert.
`python -m envs.sciworld.make_examples`.

The examples are recorded, so that a server can show them without waiting for a Java process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from envs.examples import Script, played, record
from envs.sciworld.gold import solution
from envs.sciworld.slots import Pool, SlotPool
from envs.sciworld.tasks import PUBLISHED, find_task
from envs.sciworld.world import Options, World
from envs.wire import Example

FILE = Path(__file__).with_name("examples.json")
TASKS = (3089, 4178)  # find-living-thing 153, chemistry-mix-paint-secondary-color 10
OPTIONS = Options(PUBLISHED, max_moves=100, reward="normalised")


def make(pool: Pool) -> tuple[Example, ...]:
    return tuple(
        played(World(pool, OPTIONS), task, partial(Script, _brief(task))) for task in TASKS
    )


def _brief(task_id: int) -> list[str]:
    """Return the recorded solution without `look around`, which only repeats known facts."""
    actions = solution(find_task(PUBLISHED, task_id))
    return [action for action in actions if action != "look around"]


def main() -> None:
    pool = SlotPool()
    try:
        record(FILE, make(pool))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
