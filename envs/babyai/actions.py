"""From an action's text to minigrid's moves: the low grammar names one move, the high one plans a path through what is seen."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from envs.babyai.views import Cell, Seen, View


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

_DIRECT = {name: LOW[name] for name in ("turn left", "turn right", "move forward", "drop")}
_COMMAND = re.compile(
    r"(?P<verb>go to|pickup|pick up|go through|toggle and go through) (?:the )?"
    r"(?P<colour>[a-z]+) (?:(?P<state>open|closed|locked) )?(?P<kind>ball|box|key|door)(?: (?P<number>\d{1,3}))?"
)
_AHEAD, _RIGHT, _BACK, _LEFT = range(4)
_STEP: dict[int, Cell] = {_AHEAD: (1, 0), _RIGHT: (0, -1), _BACK: (-1, 0), _LEFT: (0, 1)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an action cannot be carried out; `readable` is false where the text is no action at all."""

    reason: str
    readable: bool = True


def normalise(text: str) -> str:
    """Lower case, single blanks, no closing full stop."""
    return " ".join(text.lower().split()).rstrip(".")


def plan_low(text: str) -> list[Move] | Refusal:
    """One move, or a refusal of text that is none."""
    move = LOW.get("pickup" if text == "pick up" else text)
    return Refusal(UNREADABLE, readable=False) if move is None else [move]


def plan_high(text: str, view: View) -> list[Move] | Refusal:
    """The moves a command stands for, as far as the present view tells; never empty."""
    if text in _DIRECT:
        return [_DIRECT[text]]
    if text == "toggle":
        return [Move.TOGGLE] if _can_toggle(view) else Refusal("There is nothing in front of you to toggle.")
    match = _COMMAND.fullmatch(text)
    if match is None:
        return Refusal(UNREADABLE, readable=False)
    verb, state = match["verb"], match["state"] or ""
    named = [s for s in view.objects if (s.colour, s.kind) == (match["colour"], match["kind"]) and state in ("", s.state)]
    number = int(match["number"] or 1)
    if not 1 <= number <= len(named):
        return Refusal(f"You cannot {text}, as you see no such object.")
    target = named[number - 1]
    path = find_path(view, target.cell)
    if path is None:
        return Refusal(f"You cannot {text}, as there is no path leading to it.")
    if verb == "go to":
        return path or [Move.DONE]
    if verb in ("pickup", "pick up"):
        return [*path, Move.PICKUP] if target.kind in PORTABLE else Refusal(f"You cannot {text}, as it cannot be carried.")
    if target.kind != "door":
        return Refusal(f"You cannot {text}, as it is not a door.")
    if verb == "go through":
        return [*path, Move.FORWARD, Move.FORWARD] if target.state == "open" else Refusal(f"You cannot {text}, as the door is not open.")
    if target.state == "open":
        return Refusal(f"You cannot {text}, as the door is open already.")
    return [*path, Move.TOGGLE, Move.FORWARD, Move.FORWARD]


def available_high(view: View) -> list[str]:
    """Commands that lead somewhere from here, in a fixed order."""
    result = ["turn left", "turn right"]
    if (1, 0) in view.free:
        result.append("move forward")
    doors = []
    for seen, number in view.numbered():
        if find_path(view, seen.cell) is None:
            continue
        name = f"{seen.agentgym_name} {number}"
        result.append(f"go to {name}")
        if seen.kind in PORTABLE and not view.carrying:
            result.append(f"pickup {name}")
        if seen.state == "open":
            doors.append(f"go through {name}")
        elif seen.state == "closed" or (seen.state == "locked" and view.carrying == f"{seen.colour} key"):
            doors.append(f"toggle and go through {name}")
    result += doors
    if _can_toggle(view):
        result.append("toggle")
    if view.carrying and (1, 0) in view.free and view.in_front is None:
        result.append("drop")
    return [*result, CHECK]


def find_path(view: View, target: Cell) -> list[Move] | None:
    """Fewest turns and steps after which the agent faces `target` from the cell beside it; None where there is no way.

    Breadth first over (cell, facing); equally short ways are decided by trying left, right, forward in this order.
    """
    start = ((0, 0), _AHEAD)
    came: dict[tuple[Cell, int], tuple[tuple[Cell, int], Move] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        cell, facing = state
        front = (cell[0] + _STEP[facing][0], cell[1] + _STEP[facing][1])
        if front == target:
            return _moves_to(state, came)
        options = [(Move.LEFT, (cell, (facing - 1) % 4)), (Move.RIGHT, (cell, (facing + 1) % 4))]
        if front in view.free or front == (0, 0):
            options.append((Move.FORWARD, (front, facing)))
        for move, following in options:
            if following not in came:
                came[following] = (state, move)
                queue.append(following)
    return None


def _moves_to(state: tuple[Cell, int], came: dict[tuple[Cell, int], tuple[tuple[Cell, int], Move] | None]) -> list[Move]:
    moves: list[Move] = []
    while (step := came[state]) is not None:
        state, move = step
        moves.append(move)
    return moves[::-1]


def _can_toggle(view: View) -> bool:
    front: Seen | None = view.in_front
    return front is not None and front.kind in ("door", "box")
