"""From an action's text to minigrid's moves: the low grammar names one move, the high one plans
a path through what is seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from envs.babyai.views import VIEW_SIZE, Cell, Seen, View, number


class Move(IntEnum):
    """minigrid's own numbers."""

    LEFT = 0
    RIGHT = 1
    FORWARD = 2
    PICKUP = 3
    DROP = 4
    TOGGLE = 5
    DONE = 6  # looks around: changes nothing, but the mission is checked


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
_RIGHTWARD, _DOWNWARD, _LEFTWARD = range(3)  # minigrid's numbers of the ways the agent can look

Path = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """What an offered action does."""

    moves: Path  # empty: nothing is left to do
    target: Cell | None = None  # of the object it names


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an action cannot be carried out; `readable` is false where the text is no action at
    all.
    """

    reason: str
    readable: bool = True


def normalise(text: str) -> str:
    """Lower case, single blanks, no closing full stop."""
    return " ".join(text.lower().split()).rstrip(".")


def plan_low(text: str) -> list[Move] | Refusal:
    """One move, or a refusal of text that is none."""
    move = LOW.get("pickup" if text == "pick up" else text)
    return Refusal(UNREADABLE, readable=False) if move is None else [move]


def plan_high(text: str, view: View, offered: Mapping[str, Command]) -> Sequence[Move] | Refusal:
    """The moves a command stands for. Empty: it asks for what is the case already.

    Accepted beside what is offered: `pick up`, `the`, a name without its number or state, and
    `toggle` before any door or box.
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
    named = [
        s
        for s in view.objects
        if (s.color, s.kind) == (match["color"], match["kind"])
        and match["state"] in (None, s.state)
    ]
    if not 1 <= nth <= len(named):
        return Refusal(f"You cannot {text}, as you see no such object.")
    return Refusal(f"You cannot {text}, as {_obstacle(verb, named[nth - 1], view)}.")


def offer(view: View, compass: int) -> dict[str, Command]:
    """AgentGym's commands in its order. compass: minigrid's number of the way the agent looks.

    What can be reached is numbered for `pickup` and `go to`, all doors in view for the commands
    that go through them.
    """
    facing, entering = find_paths(view, compass)
    reachable = number([seen for seen in view.objects if seen.cell in facing])
    commands = {"turn left": Command((Move.LEFT,)), "turn right": Command((Move.RIGHT,))}
    if not _barred(view):
        commands["move forward"] = Command((Move.FORWARD,))
    if not view.carrying:
        for seen, count in reachable:
            if seen.kind in PORTABLE:
                commands[f"pickup {seen.agentgym_name} {count}"] = Command(
                    (*facing[seen.cell], Move.PICKUP), seen.cell
                )
    elif (1, 0) not in view.blocked:
        commands["drop"] = Command((Move.DROP,))
    for seen, count in number([seen for seen in view.objects if seen.kind == "door"]):
        name = f"{seen.agentgym_name} {count}"
        if seen.state == "open" and seen.cell in entering:
            commands[f"go through {name}"] = Command(entering[seen.cell], seen.cell)
        elif seen.state != "open" and seen.cell in facing and _can_open(seen, view):
            path = facing[seen.cell]
            commands[f"toggle and go through {name}"] = Command(
                (*path, Move.TOGGLE, Move.FORWARD), seen.cell
            )
            if not path:
                commands["toggle"] = Command((Move.TOGGLE,))
    for seen, count in reachable:
        commands[f"go to {seen.agentgym_name} {count}"] = Command(facing[seen.cell], seen.cell)
    commands[CHECK] = Command(())
    return commands


def find_paths(view: View, compass: int) -> tuple[dict[Cell, Path], dict[Cell, Path]]:
    """Ways to stand before each object and face it, and ways into each open door; what cannot be
    reached is left out.

    Breadth first; cells nobody sees and closed doors count as free: the walk will tell.
    AgentGym's search finds a state again and again until it expands it, and keeps the predecessor
    that found it last.
    So each layer is walked in two orders: by first finding, which decides where a way ends, and by
    last finding, which decides the way.
    """
    to_face = {_place(seen.cell): seen.cell for seen in view.objects}
    to_enter = {_place(seen.cell): seen.cell for seen in view.objects if seen.state == "open"}
    floor = _WINDOWS[compass].difference(map(_place, view.blocked))
    faced: dict[Cell, int] = {}
    entered: dict[Cell, int] = {}
    came: dict[int, int] = {}
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
        found = {
            state: [n for n in _NEXT[state] if n not in visited and n // 4 in floor]
            for state in firsts
        }
        next_lasts: dict[int, None] = {}
        for state in lasts:
            for following in found[state]:
                came[following] = state
                next_lasts.pop(following, None)
                next_lasts[following] = None
        firsts = list(dict.fromkeys(following for state in firsts for following in found[state]))
        lasts = list(next_lasts)
    return {cell: _path(state, came) for cell, state in faced.items()}, {
        cell: _path(state, came) for cell, state in entered.items()
    }


# the search's places are the cells -1..6 ahead and -4..3 to the left, numbered; a state is 4 *
# place + quarter turns to the right
def _place(cell: Cell) -> int:
    return 8 * (cell[0] + 1) + cell[1] + 4


def _following(state: int) -> tuple[int, int, int]:
    """The states after a step forward, a turn left and a turn right; negative: outside."""
    place, turned = divmod(state, 4)
    row, column = divmod(place, 8)
    row, column = row + (1, 0, -1, 0)[turned], column + (0, -1, 0, 1)[turned]
    ahead = 4 * (8 * row + column) + turned if 0 <= row < 8 and 0 <= column < 8 else -4
    return ahead, 4 * place + (turned - 1) % 4, 4 * place + (turned + 1) % 4


def _window(compass: int) -> frozenset[int]:
    """Where AgentGym looks for ways: looking some ways, one row behind or one column to the
    right of the view as well.
    """
    rows = range(-1 if compass in (_RIGHTWARD, _DOWNWARD) else 0, VIEW_SIZE)
    columns = range(-4 if compass in (_DOWNWARD, _LEFTWARD) else -3, VIEW_SIZE // 2 + 1)
    return frozenset(_place((ahead, left)) for ahead in rows for left in columns)


_NEXT = [_following(state) for state in range(4 * 64)]
_WINDOWS = [_window(compass) for compass in range(4)]


def _path(state: int, came: Mapping[int, int]) -> Path:
    moves: list[Move] = []
    while state in came:
        before = came[state]
        moves.append((Move.FORWARD, Move.LEFT, Move.RIGHT)[_NEXT[before].index(state)])
        state = before
    return tuple(reversed(moves))


def _barred(view: View) -> bool:
    return view.barrier is not None and view.barrier[1] == 1


def _can_open(door: Seen, view: View) -> bool:
    return door.state == "closed" or view.carrying == f"{door.color} key"


def _refuse_plain(text: str, view: View) -> Refusal:
    if text == "move forward" and view.barrier is not None:
        return Refusal(f"You cannot move forward, as a {view.barrier[0]} stands in front of you.")
    if text == "drop":
        return Refusal(
            "You cannot drop anything, as "
            + ("the cell in front of you is taken." if view.carrying else "your hands are empty.")
        )
    if text == "toggle":
        return Refusal("There is nothing in front of you to toggle.")
    return Refusal(UNREADABLE, readable=False)


def _obstacle(verb: str, target: Seen, view: View) -> str:
    """Why a command about something in view is not offered."""
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
