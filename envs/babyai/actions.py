"""Parsing of an action's text into minigrid's moves: the low grammar names one move, the high one
plans a path through the view.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from envs.babyai.views import KEPT, VIEW_SIZE, Cell, View, VisibleObject, number


class Move(IntEnum):
    """The actions of minigrid, with its numbers."""

    LEFT = 0
    RIGHT = 1
    FORWARD = 2
    PICKUP = 3
    DROP = 4
    TOGGLE = 5
    DONE = 6  # changes nothing, but the mission is checked


LOW: dict[str, Move] = {
    "turn left": Move.LEFT,
    "turn right": Move.RIGHT,
    "move forward": Move.FORWARD,
    "pickup": Move.PICKUP,
    "drop": Move.DROP,
    "toggle": Move.TOGGLE,
}
CHECK = "check available actions"
PORTABLE = ("ball", "box", "key")
UNREADABLE = "The action is not recognized. Please check valid actions."

_COMMAND = re.compile(
    r"(?P<verb>go to|pickup|pick up|go through|toggle and go through) (?:the )?"
    r"(?P<color>[a-z]+) (?:(?P<state>open|closed|locked) )?(?P<kind>ball|box|key|door)(?:"
    r" (?P<number>\d{1,3}))?"
)
_RIGHTWARD, _DOWNWARD, _LEFTWARD = range(3)  # minigrid's numbers of the agent's directions

Path = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """The moves of an action that is possible now, and the cell of the object that it names."""

    moves: Path  # empty: the command's goal is already reached
    target: Cell | None = None  # cell of the object that the command names


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an action cannot be carried out; not `readable` if the text is no action."""

    reason: str
    readable: bool = True


def normalise(text: str) -> str:
    """Return the text in lower case with single blanks and without final periods."""
    return " ".join(text.lower().split()).rstrip(".")


def plan_low(text: str) -> list[Move] | Refusal:
    """Return the move that a text from `normalise` names, in a list; a refusal if none."""
    move = LOW.get("pickup" if text == "pick up" else text)
    return Refusal(UNREADABLE, readable=False) if move is None else [move]


def plan_high(text: str, view: View, offered: Mapping[str, Command]) -> Sequence[Move] | Refusal:
    """Return the moves of a command, or a refusal. No moves: the command's goal is already reached.

    text: from `normalise`. offered: the result of `offer`.
    Accepted in addition to the offered commands: `pick up`, `the`, a name without its number or
    state, and `toggle` in front of any door or box.
    """
    if text in offered:
        return offered[text].moves
    if text == "toggle" and view.in_front is not None and view.in_front.kind in ("door", "box"):
        return (Move.TOGGLE,)
    match = _COMMAND.fullmatch(text)
    if match is None:
        return _refuse_plain(text, view)
    verb = "pickup" if match["verb"] == "pick up" else match["verb"]
    nth = int(match["number"] or 1)
    for state in (match["state"],) if match["state"] else ("", "open", "closed", "locked"):
        name = " ".join(filter(None, (match["color"], state, match["kind"])))
        command = offered.get(f"{verb} {name} {nth}")
        if command is not None:
            return command.moves
    named = [o for o in view.objects if (o.color, o.kind) == (match["color"], match["kind"])]
    if match["state"]:
        named = [obj for obj in named if obj.state == match["state"]]
    if not 1 <= nth <= len(named):
        return Refusal(f"You cannot {text}, as you see no such object.")
    return Refusal(f"You cannot {text}, as {_obstacle(verb, named[nth - 1], view)}.")


@lru_cache(maxsize=KEPT)
def offer(view: View, compass: int) -> Mapping[str, Command]:
    """Return the commands possible now, by their text, in AgentGym's order. Kept, because samples
    of an item see the same views.

    compass: minigrid's number of the agent's direction.
    `pickup` and `go to` number the reachable objects; commands that go through doors number all
    doors in view.
    """
    facing, entering = find_paths(view, compass)
    reachable = number([obj for obj in view.objects if obj.cell in facing])
    commands = {"turn left": Command((Move.LEFT,)), "turn right": Command((Move.RIGHT,))}
    if view.barrier is None or view.barrier[1] != 1:
        commands["move forward"] = Command((Move.FORWARD,))
    if not view.carrying:
        for obj, count in reachable:
            if obj.kind in PORTABLE:
                moves = (*facing[obj.cell], Move.PICKUP)
                commands[f"pickup {obj.agentgym_name} {count}"] = Command(moves, obj.cell)
    elif (1, 0) not in view.blocked:
        commands["drop"] = Command((Move.DROP,))
    for obj, count in number([obj for obj in view.objects if obj.kind == "door"]):
        name = f"{obj.agentgym_name} {count}"
        if obj.state == "open" and obj.cell in entering:
            commands[f"go through {name}"] = Command(entering[obj.cell], obj.cell)
        elif obj.state != "open" and obj.cell in facing and _can_open(obj, view):
            moves = (*facing[obj.cell], Move.TOGGLE, Move.FORWARD)
            commands[f"toggle and go through {name}"] = Command(moves, obj.cell)
            if not facing[obj.cell]:
                commands["toggle"] = Command((Move.TOGGLE,))
    for obj, count in reachable:
        commands[f"go to {obj.agentgym_name} {count}"] = Command(facing[obj.cell], obj.cell)
    commands[CHECK] = Command(())
    return commands


def find_paths(view: View, compass: int) -> tuple[dict[Cell, Path], dict[Cell, Path]]:
    """Return two dicts by the object's cell: paths that end in front of the object, facing it, and
    paths into open doors. Unreachable objects are left out. compass: as in `offer`.

    The search is breadth first. Unseen cells and closed doors count as free; a walk that is blocked
    stops there.
    AgentGym's search may discover a state several times before it expands it, and keeps the last
    predecessor. To return the same paths, each layer is visited in two orders: by first discovery,
    which decides where a path ends, and by last discovery, which decides the path.
    """
    to_face = {_place(obj.cell): obj.cell for obj in view.objects}
    to_enter = {_place(obj.cell): obj.cell for obj in view.objects if obj.state == "open"}
    floor = _WINDOWS[compass].difference(map(_place, view.blocked))
    faced: dict[Cell, int] = {}
    entered: dict[Cell, int] = {}
    predecessor: dict[int, int] = {}
    start = 4 * _place((0, 0))
    visited: set[int] = set()
    firsts, lasts = [start], [start]
    while firsts and (to_face or to_enter):
        visited.update(firsts)
        for state in firsts:
            front = _NEXT[state][0] // 4
            if front in to_face:
                faced[to_face.pop(front)] = state
            if state // 4 in to_enter:
                entered[to_enter.pop(state // 4)] = state
        neighbors = {
            state: [n for n in _NEXT[state] if n not in visited and n // 4 in floor]
            for state in firsts
        }
        next_lasts: dict[int, None] = {}
        for state in lasts:
            for following in neighbors[state]:
                predecessor[following] = state
                next_lasts.pop(following, None)
                next_lasts[following] = None
        firsts = list(dict.fromkeys(new for state in firsts for new in neighbors[state]))
        lasts = list(next_lasts)
    return (
        {cell: _path(state, predecessor) for cell, state in faced.items()},
        {cell: _path(state, predecessor) for cell, state in entered.items()},
    )


# the search numbers the cells -1..6 ahead and -4..3 to the left; a state is 4 * cell number +
# quarter turns to the right
def _place(cell: Cell) -> int:
    return 8 * (cell[0] + 1) + cell[1] + 4


def _following(state: int) -> tuple[int, int, int]:
    """Return the states after a step forward, a turn left and a turn right; negative: outside."""
    index, turned = divmod(state, 4)
    row, column = divmod(index, 8)
    row, column = row + (1, 0, -1, 0)[turned], column + (0, -1, 0, 1)[turned]
    ahead = 4 * (8 * row + column) + turned if 0 <= row < 8 and 0 <= column < 8 else -4
    return ahead, 4 * index + (turned - 1) % 4, 4 * index + (turned + 1) % 4


def _window(compass: int) -> frozenset[int]:
    """Return the cells of AgentGym's search, as `_place` numbers them. For some directions they
    include one row behind the agent or one column to the right of the view.
    """
    rows = range(-1 if compass in (_RIGHTWARD, _DOWNWARD) else 0, VIEW_SIZE)
    columns = range(-4 if compass in (_DOWNWARD, _LEFTWARD) else -3, VIEW_SIZE // 2 + 1)
    return frozenset(_place((ahead, left)) for ahead in rows for left in columns)


_NEXT = [_following(state) for state in range(4 * 64)]
_WINDOWS = [_window(compass) for compass in range(4)]


def _path(state: int, predecessor: Mapping[int, int]) -> Path:
    moves: list[Move] = []
    while state in predecessor:
        before = predecessor[state]
        moves.append((Move.FORWARD, Move.LEFT, Move.RIGHT)[_NEXT[before].index(state)])
        state = before
    return tuple(reversed(moves))


def _can_open(door: VisibleObject, view: View) -> bool:
    return door.state == "closed" or view.carrying == f"{door.color} key"


def _refuse_plain(text: str, view: View) -> Refusal:
    if text == "move forward" and view.barrier is not None:
        return Refusal(f"You cannot move forward, as a {view.barrier[0]} stands in front of you.")
    if text == "drop":
        why = "the cell in front of you is taken" if view.carrying else "your hands are empty"
        return Refusal(f"You cannot drop anything, as {why}.")
    if text == "toggle":
        return Refusal("There is nothing in front of you to toggle.")
    return Refusal(UNREADABLE, readable=False)


def _obstacle(verb: str, target: VisibleObject, view: View) -> str:
    """Return the reason why a command about an object in view is not offered."""
    if verb == "pickup" and target.kind not in PORTABLE:
        return "it cannot be carried"
    if verb == "pickup" and view.carrying:
        return "your hands are full"
    if "through" in verb and target.kind != "door":
        return "it is not a door"
    if verb == "go through" and target.state != "open":
        return "the door is not open"
    if verb == "toggle and go through" and target.state == "open":
        return "the door is open already"
    if verb == "toggle and go through" and not _can_open(target, view):
        return "the door is locked and you do not carry its key"
    return "there is no path leading to it"
