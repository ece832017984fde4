"""What the agent sees as text: minigrid's 7x7 view decoded, and the two wordings of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

Cell = tuple[int, int]  # (steps ahead, steps to the left) of the agent; right is negative

VIEW_SIZE = 7
_UNSEEN, _EMPTY, _WALL, _FLOOR, _DOOR = 0, 1, 2, 3, 4
_DOOR_STATES = ("open", "closed", "locked")


@dataclass(frozen=True, slots=True)
class Seen:
    """One object in view."""

    kind: str
    colour: str
    state: str  # open, closed or locked for doors, else empty
    ahead: int
    left: int  # negative: to the right

    @property
    def cell(self) -> Cell:
        return self.ahead, self.left

    @property
    def name(self) -> str:
        """`red ball`, `closed red door`."""
        return f"{self.state} {self.colour} {self.kind}" if self.state else f"{self.colour} {self.kind}"

    @property
    def agentgym_name(self) -> str:
        """`red ball`, `red closed door`."""
        return f"{self.colour} {self.state} {self.kind}" if self.state else f"{self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class View:
    """Everything in view, nearest first."""

    objects: tuple[Seen, ...]
    free: frozenset[Cell]  # cells seen that can be walked on, open doors included
    walls: frozenset[Cell]
    carrying: str  # `red key`, or empty

    @property
    def in_front(self) -> Seen | None:
        return next((seen for seen in self.objects if seen.cell == (1, 0)), None)

    @property
    def wall_ahead(self) -> int | None:
        """Steps to the nearest wall straight ahead that is in view."""
        return min((ahead for ahead, left in self.walls if left == 0), default=None)

    def numbered(self) -> list[tuple[Seen, int]]:
        """Objects of one name are numbered from 1, nearest first."""
        counts: dict[str, int] = {}
        result = []
        for seen in self.objects:
            counts[seen.agentgym_name] = counts.get(seen.agentgym_name, 0) + 1
            result.append((seen, counts[seen.agentgym_name]))
        return result


def decode(image: Any) -> View:
    """image: [7, 7, 3] of (object, colour, state), the agent at column 3 of the last row, looking up."""
    objects, free, walls = [], [], []
    rows = image.tolist()
    carried = rows[VIEW_SIZE // 2][VIEW_SIZE - 1]
    for column, cells in enumerate(rows):
        for row, (kind, colour, state) in enumerate(cells):
            ahead, left = VIEW_SIZE - 1 - row, VIEW_SIZE // 2 - column
            if kind == _UNSEEN or (ahead == 0 and left == 0):
                continue
            if kind == _WALL:
                walls.append((ahead, left))
            elif kind in (_EMPTY, _FLOOR):
                free.append((ahead, left))
            else:
                objects.append(Seen(IDX_TO_OBJECT[kind], IDX_TO_COLOR[colour], _DOOR_STATES[state] if kind == _DOOR else "", ahead, left))
                if kind == _DOOR and state == 0:
                    free.append((ahead, left))
    objects.sort(key=lambda seen: (seen.ahead + abs(seen.left), abs(seen.left), -seen.left))
    carrying = f"{IDX_TO_COLOR[carried[1]]} {IDX_TO_OBJECT[carried[0]]}" if carried[0] > _DOOR else ""
    return View(tuple(objects), frozenset(free), frozenset(walls), carrying)


def compact(view: View, *, goal: str = "", note: str = "", actions: Sequence[str] = ()) -> str:
    """A few words for a small model; empty parts are left out."""
    parts = [f"{seen.name} {_where(seen)}" for seen in view.objects]
    wall = view.wall_ahead
    if wall is not None:
        parts.append(f"wall {wall} ahead")
    lines = [note] if note else []
    if goal:
        lines.append(f"goal: {goal}")
    lines.append("see: " + (", ".join(parts) or "nothing"))
    if view.carrying:
        lines.append(f"carry: {view.carrying}")
    if actions:
        lines.append("actions: " + ", ".join(actions))
    return "\n".join(lines)


def agentgym(view: View, *, goal: str = "", note: str = "", actions: Sequence[str] = ()) -> str:
    """AgentGym's wording: whole sentences, then the list of actions that are possible now."""
    sentences = [f"There is a {seen.agentgym_name} {number} {_where_in_words(seen)}." for seen, number in view.numbered()]
    if sentences:
        sentences.insert(0, "In front of you in this room, you can see several objects:")
    if view.walls:
        sentences.append("The room has walls around you.")
    front = next(((seen, number) for seen, number in view.numbered() if seen.left == 0), None)
    wall = view.wall_ahead
    if front is not None and (wall is None or front[0].ahead < wall):
        sentences.append(f"You are facing a {front[0].agentgym_name} {front[1]} {front[0].ahead} steps away.")
    elif wall is not None:
        sentences.append(f"You are facing a wall {wall} steps away.")
    sentences.append(f"You are carrying a {view.carrying}." if view.carrying else "You are not carrying anything.")
    lines = [f"Your goal: {goal}"] if goal else []
    lines += [note] if note else []
    lines += [" ".join(sentences), f"Available actions: {json.dumps(list(actions))}"]
    return "\n".join(lines)


def _where(seen: Seen) -> str:
    words = [f"{seen.ahead} ahead"] if seen.ahead else []
    if seen.left:
        words.append(f"{abs(seen.left)} {_side(seen)}")
    return " ".join(words)


def _where_in_words(seen: Seen) -> str:
    if seen.left == 0:
        return f"right in front of you {seen.ahead} steps away"
    side = f"{abs(seen.left)} steps to your {_side(seen)}"
    return f"{seen.ahead} steps in front of you and {side}" if seen.ahead else side


def _side(seen: Seen) -> str:
    return "left" if seen.left > 0 else "right"
