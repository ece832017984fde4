"""The expert for a laboratory task: it replays recorded actions that solve the task."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from envs.env import ExpertFailed
from envs.sciworld.tasks import Task

GOLD = Path(__file__).with_name("gold.json.gz")  # made by make_gold.py


@functools.cache
def _recorded() -> dict[str, dict[str, list[str]]]:
    recorded: dict[str, dict[str, list[str]]] = json.loads(gzip.decompress(GOLD.read_bytes()))
    return recorded


def solution(task: Task) -> list[str]:
    """Return the recorded actions that solve a task; empty if no solution is known."""
    return _recorded().get(task.name, {}).get(str(task.variation), [])


class Recording:
    """An expert that replays a recorded solution; it fails once the episode deviates from it."""

    def __init__(self, task: Task, played: Sequence[str]) -> None:
        self._task = task
        self._played = played

    def next_action(self) -> str:
        actions, name = solution(self._task), f"{self._task.name} {self._task.variation}"
        if not actions:
            raise ExpertFailed(f"no solution of {name} is recorded")
        turn = len(self._played)
        if list(self._played) != actions[:turn] or turn == len(actions):
            raise ExpertFailed(f"the episode left the recorded solution of {name}")
        return actions[turn]
