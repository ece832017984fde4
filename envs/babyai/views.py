"""The agent's view as text: minigrid's 7x7 view is decoded and described in one of two styles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

Cell = tuple[int, int]  # (steps ahead, steps to the left) of the agent; right is negative

VIEW_SIZE = 7
KEPT = 4096  # views and worlds, in each cache of what was found out about them; some 50 MB
_UNSEEN, _EMPTY, _WALL, _FLOOR, _DOOR = 0, 1, 2, 3, 4
DOOR_STATES = ("open", "closed", "locked")


@dataclass(frozen=True, slots=True)
class VisibleObject:
    """One object in view."""

    kind: str
    color: str
    state: str  # open, closed or locked for doors, else empty
    ahead: int
    left: int  # negative: to the right

    @property
    def cell(self) -> Cell:
        return self.ahead, self.left

    @property
    def name(self) -> str:
        """Name in the compact style: `red ball`, `closed red door`."""
        return " ".join(filter(None, (self.state, self.color, self.kind)))

    @property
    def agentgym_name(self) -> str:
        """Name in AgentGym's style: `red ball`, `red closed door`."""
        return " ".join(filter(None, (self.color, self.state, self.kind)))


@dataclass(frozen=True)
class View:
    """Objects in view, nearest first; the walls in view; and the carried object."""

    objects: tuple[VisibleObject, ...]
    walls: frozenset[Cell]
    carrying: str  # `red key`, or empty

    @cached_property
    def in_front(self) -> VisibleObject | None:
        return next((obj for obj in self.objects if obj.cell == (1, 0)), None)

    @cached_property
    def wall_ahead(self) -> int | None:
        """Number of steps to the nearest wall in view straight ahead; None if there is none."""
        return min((ahead for ahead, left in self.walls if left == 0), default=None)

    @cached_property
    def barrier(self) -> tuple[str, int] | None:
        """Return (kind, distance) of the nearest wall or box straight ahead, None without one.
        AgentGym reports this one as faced. Balls, keys and doors do not count.
        """
        ahead = [("box", obj.ahead) for obj in self.objects if obj.kind == "box" and obj.left == 0]
        if self.wall_ahead is not None:
            ahead.append(("wall", self.wall_ahead))
        return min(ahead, key=lambda barrier: barrier[1], default=None)

    @cached_property
    def blocked(self) -> frozenset[Cell]:
        """Return the cells in view that the agent cannot enter, without doors, which may open."""
        return self.walls.union(obj.cell for obj in self.objects if obj.kind != "door")


def number(objects: Iterable[VisibleObject]) -> list[tuple[VisibleObject, int]]:
    """Return (object, number): objects of equal name are numbered from 1, in the given order."""
    counts: dict[str, int] = {}
    result = []
    for obj in objects:
        counts[obj.agentgym_name] = counts.get(obj.agentgym_name, 0) + 1
        result.append((obj, counts[obj.agentgym_name]))
    return result


def decode(image: Any) -> View:
    """Return the view in minigrid's image.
    image: [7, 7, 3] of (object, color, state), the agent at column 3 of the last row, looking up.
    """
    return _decode(image.astype(np.uint8, copy=False).tobytes())


@lru_cache(maxsize=KEPT)
def _decode(pixels: bytes) -> View:
    objects, walls = [], []
    rows = np.frombuffer(pixels, np.uint8).reshape(VIEW_SIZE, VIEW_SIZE, 3).tolist()
    carried = rows[VIEW_SIZE // 2][VIEW_SIZE - 1]
    for column, cells in enumerate(rows):
        for row, (kind, color, state) in enumerate(cells):
            ahead, left = VIEW_SIZE - 1 - row, VIEW_SIZE // 2 - column
            if kind == _UNSEEN or (ahead == 0 and left == 0):
                continue
            if kind == _WALL:
                walls.append((ahead, left))
            elif kind not in (_EMPTY, _FLOOR):
                named = IDX_TO_OBJECT[kind], IDX_TO_COLOR[color]
                condition = DOOR_STATES[state] if kind == _DOOR else ""
                objects.append(VisibleObject(*named, condition, ahead, left))
    objects.sort(key=lambda obj: (obj.ahead + abs(obj.left), abs(obj.left), -obj.left))
    name = f"{IDX_TO_COLOR[carried[1]]} {IDX_TO_OBJECT[carried[0]]}" if carried[0] > _DOOR else ""
    return View(tuple(objects), frozenset(walls), name)


def compact(view: View, *, goal: str = "", note: str = "", actions: Sequence[str] = ()) -> str:
    """Describe the view in a few words for a small model; empty arguments add no line."""
    parts = [f"{obj.name} {_where(obj)}" for obj in view.objects]
    if view.wall_ahead is not None:
        parts.append(f"wall {view.wall_ahead} ahead")
    lines = {
        "goal": goal,
        "see": ", ".join(parts) or "nothing",
        "carry": view.carrying,
        "actions": ", ".join(actions),
    }
    shown = [f"{title}: {text}" for title, text in lines.items() if text]
    return "\n".join([note, *shown] if note else shown)


@lru_cache(maxsize=KEPT)
def agentgym(
    view: View, *, goal: str = "", closing: str = "", actions: tuple[str, ...] = ()
) -> str:
    """Describe the view in AgentGym's structure: the goal, the objects in whole sentences, a
    closing line, and the list of actions possible now. An empty goal or closing adds no line.
    """
    sentences = [
        f"There is a {obj.agentgym_name} {count} {_where_in_words(obj)}."
        for obj, count in number(view.objects)
    ]
    if sentences:
        sentences.insert(0, "In front of you in this room, you can see several objects:")
    if view.walls:
        sentences.append("The room has walls around you.")
    if view.barrier is not None:
        sentences.append("You are facing a {} {} steps away.".format(*view.barrier))
    carried = f"carrying a {view.carrying}" if view.carrying else "not carrying anything"
    sentences.append(f"You are {carried}.")
    lines = [f"Your goal: {goal}" if goal else "", " ".join(sentences), closing]
    return agentgym_reply("\n".join(filter(None, lines)), actions)


def agentgym_reply(text: str, actions: Sequence[str]) -> str:
    """Return the text with the list of possible actions, which ends all of AgentGym's answers."""
    return f"{text}\nAvailable actions: {json.dumps(list(actions))}"


def _where(obj: VisibleObject) -> str:
    words = [f"{obj.ahead} ahead"] if obj.ahead else []
    if obj.left:
        words.append(f"{abs(obj.left)} {_side(obj)}")
    return " ".join(words)


def _where_in_words(obj: VisibleObject) -> str:
    if obj.left == 0:
        return f"right in front of you {obj.ahead} steps away"
    return f"{obj.ahead} steps in front of you and {abs(obj.left)} steps to your {_side(obj)}"


def _side(obj: VisibleObject) -> str:
    return "left" if obj.left > 0 else "right"
