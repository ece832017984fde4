"""What an environment drew, as a page can show it: a grid, an inventory with its recipe tree,
rooms, searches, a picture, or plain text. It comes from a server, so nothing in it is trusted.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.viewer.replay import Shot

MAX_CELLS = 64  # of a grid, each way
MAX_NODES = 2_000  # of a tree
MAX_DEPTH = 12
_COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
_PNG = b"\x89PNG\r\n\x1a\n"
_HELD = re.compile(r"\[([^\]]*)\] \((\d+)\)")


@dataclass(frozen=True, slots=True)
class Node:
    """A line of a tree, with what is below it."""

    text: str
    note: str = ""
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Thing:
    """What stands in a cell of a grid."""

    x: int
    y: int
    kind: str
    color: str
    state: str

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.state, self.color, self.kind)))


@dataclass(frozen=True, slots=True)
class Drawing:
    """One of: grid, craft, rooms, search, image, text, none."""

    kind: str
    title: str = ""
    text: str = ""
    width: int = 0
    height: int = 0
    agent: tuple[int, int, int] = (0, 0, 0)  # x, y, direction
    things: tuple[Thing, ...] = ()
    held: tuple[tuple[str, int], ...] = ()  # what is carried, and how many
    trees: tuple[Node, ...] = field(default=())

    @property
    def summary(self) -> str:
        """For who cannot see the drawing."""
        x, y, direction = self.agent
        way = ("right", "down", "left", "up")[direction % 4]
        seen = [f"{each.name} at {each.x}, {each.y}" for each in self.things if each.kind != "wall"]
        return f"agent at {x}, {y} looking {way}; {'; '.join(seen) or 'nothing else'}"


NOTHING = Drawing("none")


def drawing_of(shot: Shot | None) -> Drawing:
    """As rich as its content allows; text or nothing where it is not what it should be."""
    if shot is None or not shot.media_type:
        return NOTHING
    if shot.media_type == "image/png":
        if not shot.data.startswith(_PNG):
            return NOTHING
        try:
            return _grid(json.loads(png_text(shot.data, "grid")))
        except (ValueError, KeyError, TypeError, LookupError):
            return Drawing("image")
    text = shot.data.decode("utf-8", "replace")
    if shot.media_type == "application/json":
        try:
            return _rooms(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return Drawing("text", text=text)
    if text.startswith("Goal: "):
        return _craft(text)
    return _search(text) if text.startswith("Question (") else Drawing("text", text=text)


def png_text(data: bytes, name: str) -> str:
    """A text that a PNG carries under a name. Errors: KeyError, ValueError."""
    place, wanted = len(_PNG), name.encode() + b"\0"
    while place + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        content = data[place + 8 : place + 8 + size]
        if kind == b"tEXt" and content.startswith(wanted):
            return content[len(wanted) :].decode("latin-1")
        place += 12 + size
    raise KeyError(name)


def _grid(told: Mapping[str, Any]) -> Drawing:
    width, height = int(told["width"]), int(told["height"])
    if not (0 < width <= MAX_CELLS and 0 < height <= MAX_CELLS):
        raise ValueError("a grid too large to draw")
    agent, carried = told["agent"], told["carrying"]
    things = tuple(
        Thing(
            int(each["x"]),
            int(each["y"]),
            str(each["kind"])[:20],
            str(each["color"]) if each["color"] in _COLORS and each["kind"] != "wall" else "",
            str(each["state"])[:20],
        )
        for each in told["things"][: MAX_CELLS**2]
    )
    held = ((f"{carried['color']} {carried['kind']}"[:60], 1),) if carried else ()
    return Drawing(
        "grid",
        str(told["mission"])[:300],
        width=width,
        height=height,
        agent=(int(agent["x"]), int(agent["y"]), int(agent["direction"]) % 4),
        things=things,
        held=held,
    )


def _craft(text: str) -> Drawing:
    """TextCraft: a title, the inventory, then a line per ingredient, indented by depth."""
    title, _, rest = text.partition("\n")
    inventory, _, tree = rest.partition("\n")
    held = tuple((name, int(n[:9])) for name, n in _HELD.findall(inventory))
    lines = [line for line in tree.splitlines() if line.strip()][:MAX_NODES]
    return Drawing("craft", title, held=held, trees=_indented(lines))


def _indented(lines: Sequence[str]) -> tuple[Node, ...]:
    """A tree of lines that two blanks a level indent."""
    open_at: list[list[Node]] = [[]]  # children so far, of each level that is open
    for line in reversed(lines):  # a line's children stand below it: they are known first
        depth = min((len(line) - len(line.lstrip())) // 2, MAX_DEPTH)
        while len(open_at) < depth + 2:
            open_at.append([])
        what, _, how = line.strip().partition(": ")
        own = tuple(reversed([node for deeper in open_at[depth + 1 :] for node in deeper]))
        del open_at[depth + 1 :]
        open_at[depth].append(Node(what, how, own))
    return tuple(reversed([node for level in open_at for node in level]))


def _search(text: str) -> Drawing:
    """SearchQA: the question, then each search with its documents, then the answers."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    title, trees = blocks[0], []
    for block in blocks[1:MAX_NODES]:
        head, *documents = block.splitlines()
        if not head.startswith("Search "):
            trees += [Node(line) for line in (head, *documents)]
            continue
        what, _, query = head.partition(": ")
        found = (line.strip().partition(": ") for line in documents)
        nodes = tuple(Node(name, said) for name, _, said in found)
        trees.append(Node(query, what, nodes))
    return Drawing("search", title, trees=tuple(trees))


def _rooms(told: Mapping[str, Any]) -> Drawing:
    """SciWorld: where the agent is, what it holds, and every room with what stands in it."""
    count = iter(range(MAX_NODES))
    rooms = tuple(
        Node(
            str(room["name"]),
            "the agent is here" if room["name"] == told["room"] else "",
            tuple(_things(room["objects"], count, 0)),
        )
        for room in told["rooms"]
    )
    held = tuple((str(each.get("name", "?")), 1) for each in told["inventory"])
    score = f"{told['task']}: {told['description']} (score {told['score']}, {told['moves']} moves)"
    return Drawing("rooms", score, held=held, trees=rooms)


def _things(things: Any, count: Iterator[int], depth: int) -> Iterator[Node]:
    for each in things if depth < MAX_DEPTH else ():
        if next(count, None) is None:
            return
        inside = tuple(_things(each.get("contents") or (), count, depth + 1))
        matter = [str(each["state"])] if each.get("state") else []
        matter += [f"{each['temperature_c']} °C"] if "temperature_c" in each else []
        yield Node(str(each.get("name", "?")), ", ".join(matter), inside)


_LINE = re.compile(r"(?P<indent>\s*)\[(?P<id>\d+)\] (?P<role>\w+) (?P<rest>.*)")


def accessibility(text: str) -> list[tuple[int, str, str, str]]:
    """WebArena's observation, a line each: (depth, element, role, the rest); lines that are no
    element have neither. Depth is a level of indentation, at most eight.
    """
    found = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            found.append((0, "", "", line))
        else:
            depth = math.ceil(len(match["indent"].expandtabs(4)) / 4)
            found.append((min(depth, 8), match["id"], match["role"], match["rest"]))
    return found
