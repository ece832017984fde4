"""The laboratory tasks and their indices."""

from __future__ import annotations

from dataclasses import dataclass

from envs.env import UnknownTask

# name in the engine: number of variations (scienceworld 1.2.3), in the engine's order
VARIATIONS = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
NOT_PUBLISHED = ("grow-", "inclined-plane-", "mendelian-genetics-")
# 23 of the 30 tasks, with 4,639 variations
PUBLISHED = tuple(name for name in VARIATIONS if not name.startswith(NOT_PUBLISHED))


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    variation: int


def find_task(names: tuple[str, ...], index: int) -> Task:
    """Return the task of an index: all variations of the first name, then of the second, and so on.
    Errors: UnknownTask for an index beyond the last.
    """
    left = index
    for name in names:
        if left < VARIATIONS[name]:
            return Task(name, left)
        left -= VARIATIONS[name]
    raise UnknownTask(
        f"sciworld task {index}: these {len(names)} kinds of task have the indices 0 to"
        f" {num_tasks(names) - 1}"
    )


def num_tasks(names: tuple[str, ...]) -> int:
    return sum(VARIATIONS[name] for name in names)
