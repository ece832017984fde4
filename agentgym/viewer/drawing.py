"""An environment's state for display: a grid, an inventory with its recipe tree, rooms, searches, a
picture, or plain text. The data comes from a server, so none of it is trusted.
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

MAX_CELLS = 64  # width and height of a grid
MAX_NODES = 2_000  # of a tree
MAX_DEPTH = 12
_COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
_PNG = b"\x89PNG\r\n\x1a\n"
_HELD = re.compile(r"\[([^\]]*)\] \((\d+)\)")


@dataclass(frozen=True, slots=True)
class Node:
    """A line of a tree, with the lines below it."""

    text: str
    note: str = ""
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Thing:
    """An object in a cell of a grid."""

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
    """An environment's state to draw; kind is grid, craft, rooms, search, image, text or none."""

    kind: str
    title: str = ""
    text: str = ""
    width: int = 0
    height: int = 0
    agent: tuple[int, int, int] = (0, 0, 0)  # x, y, direction
    things: tuple[Thing, ...] = ()
    held: tuple[tuple[str, int], ...] = ()  # (carried item, count)
    trees: tuple[Node, ...] = field(default=())

    @property
    def summary(self) -> str:
        """Agent and objects of a grid, without its walls, in words for screen readers."""
        x, y, direction = self.agent
        way = ("right", "down", "left", "up")[direction % 4]
        objects = [f"{t.name} at {t.x}, {t.y}" for t in self.things if t.kind != "wall"]
        return f"agent at {x}, {y} looking {way}; {'; '.join(objects) or 'nothing else'}"


NOTHING = Drawing("none")


def drawing_of(shot: Shot | None) -> Drawing:
    """Return the state parsed from a shot, or its picture or text if it cannot be parsed.
    NOTHING without a shot, without its data, or if the data of a PNG are not a PNG.
    """
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
    """Return the text that a PNG stores under a keyword (tEXt chunk). Errors: KeyError."""
    offset, prefix = len(_PNG), name.encode() + b"\0"
    while offset + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[offset : offset + 8])
        content = data[offset + 8 : offset + 8 + size]
        if kind == b"tEXt" and content.startswith(prefix):
            return content[len(prefix) :].decode("latin-1")
        offset += 12 + size
    raise KeyError(name)


def _grid(content: Mapping[str, Any]) -> Drawing:
    width, height = int(content["width"]), int(content["height"])
    if not (0 < width <= MAX_CELLS and 0 < height <= MAX_CELLS):
        raise ValueError("a grid too large to draw")
    agent, carried = content["agent"], content["carrying"]
    things = tuple(
        Thing(
            int(thing["x"]),
            int(thing["y"]),
            str(thing["kind"])[:20],
            str(thing["color"]) if thing["color"] in _COLORS and thing["kind"] != "wall" else "",
            str(thing["state"])[:20],
        )
        for thing in content["things"][: MAX_CELLS**2]
    )
    inventory = ((f"{carried['color']} {carried['kind']}"[:60], 1),) if carried else ()
    title = str(content["mission"])[:300]
    agent_at = (int(agent["x"]), int(agent["y"]), int(agent["direction"]) % 4)
    return Drawing("grid", title, "", width, height, agent_at, things, inventory)


def _craft(text: str) -> Drawing:
    """Parse TextCraft's state: title, inventory, then a line per ingredient, indented by depth."""
    title, _, rest = text.partition("\n")
    inventory, _, tree = rest.partition("\n")
    carried = tuple((name, int(n[:9])) for name, n in _HELD.findall(inventory))
    lines = [line for line in tree.splitlines() if line.strip()][:MAX_NODES]
    return Drawing("craft", title, held=carried, trees=_indented(lines))


def _indented(lines: Sequence[str]) -> tuple[Node, ...]:
    """Return the trees of lines indented by two spaces per level. Text after `: ` is the note."""
    open_at: list[list[Node]] = [[]]  # children so far, by open level
    for line in reversed(lines):  # bottom up: children come before their parent
        depth = min((len(line) - len(line.lstrip())) // 2, MAX_DEPTH)
        while len(open_at) < depth + 2:
            open_at.append([])
        text, _, note = line.strip().partition(": ")
        children = tuple(reversed([node for deeper in open_at[depth + 1 :] for node in deeper]))
        del open_at[depth + 1 :]
        open_at[depth].append(Node(text, note, children))
    return tuple(reversed([node for level in open_at for node in level]))


def _search(text: str) -> Drawing:
    """Parse SearchQA: the question, then each search with its documents, then the answers."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    title, trees = blocks[0], []
    for block in blocks[1:MAX_NODES]:
        head, *documents = block.splitlines()
        if not head.startswith("Search "):
            trees += [Node(line) for line in (head, *documents)]
            continue
        label, _, query = head.partition(": ")
        pairs = (line.strip().partition(": ") for line in documents)
        nodes = tuple(Node(name, text_of_document) for name, _, text_of_document in pairs)
        trees.append(Node(query, label, nodes))
    return Drawing("search", title, trees=tuple(trees))


def _rooms(state: Mapping[str, Any]) -> Drawing:
    """Parse SciWorld: the agent's room, its inventory, and every room with its contents."""
    count = iter(range(MAX_NODES))
    rooms = tuple(
        Node(
            str(room["name"]),
            "the agent is here" if room["name"] == state["room"] else "",
            tuple(_things(room["objects"], count, 0)),
        )
        for room in state["rooms"]
    )
    carried = tuple((str(item.get("name", "?")), 1) for item in state["inventory"])
    score = f"score {state['score']}, {state['moves']} moves"
    title = f"{state['task']}: {state['description']} ({score})"
    return Drawing("rooms", title, held=carried, trees=rooms)


def _things(things: Any, count: Iterator[int], depth: int) -> Iterator[Node]:
    for thing in things if depth < MAX_DEPTH else ():
        if next(count, None) is None:
            return
        inside = tuple(_things(thing.get("contents") or (), count, depth + 1))
        matter = [str(thing["state"])] if thing.get("state") else []
        matter += [f"{thing['temperature_c']} °C"] if "temperature_c" in thing else []
        yield Node(str(thing.get("name", "?")), ", ".join(matter), inside)


_LINE = re.compile(r"(?P<indent>\s*)\[(?P<id>\d+)\] (?P<role>\w+) (?P<rest>.*)")


def accessibility(text: str) -> list[tuple[int, str, str, str]]:
    """Return the lines of a WebArena observation as (depth from 0 to 8, element's id, role, rest).
    A line that describes no element is returned whole as `rest`, with depth 0 and empty texts.
    """
    lines = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            lines.append((0, "", "", line))
        else:
            depth = math.ceil(len(match["indent"].expandtabs(4)) / 4)
            lines.append((min(depth, 8), match["id"], match["role"], match["rest"]))
    return lines
