"""A page as text in WebArena's format: the accessibility tree of the nodes inside the window.

The browser returns two trees with the same `backendNodeId`: the accessibility tree has role and
name of a node, the layout snapshot its position.
Source: the printed form of WebArena, arXiv:2307.13854, section 2.3 and figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MAX_NAME = 2_000  # characters of one name; pages in use stay far below
MAX_OPTIONS = 100  # printed options of one select box
_HIDDEN_PROPERTIES = {
    *("focusable", "editable", "readonly", "level"),
    *("settable", "multiline", "invalid", "url"),
}
_EMPTY_ROLES = {
    *("generic", "img", "list", "strong", "paragraph", "banner", "navigation"),
    *("Section", "LabelText", "Legend", "listitem", "none", "MenuListPopup"),
}
_DROPPED_ROLES = {"InlineTextBox", "ListMarker", "LineBreak"}
_SPELLING = {"image": "img"}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in the window, in CSS pixels."""

    x: float
    y: float
    width: float
    height: float

    def cut(self, other: Box) -> Box:
        x, y = max(self.x, other.x), max(self.y, other.y)
        right = min(self.x + self.width, other.x + other.width)
        bottom = min(self.y + self.height, other.y + other.height)
        return Box(x, y, max(0.0, right - x), max(0.0, bottom - y))

    @property
    def empty(self) -> bool:
        return self.width <= 0 or self.height <= 0


@dataclass(frozen=True, slots=True)
class Element:
    """The element behind a printed line; `id` is printed, `backend_id` is the browser's."""

    id: int
    role: str
    name: str
    backend_id: int
    document: int = 0  # document number of its tab when it was printed

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


@dataclass(slots=True)
class Layout:
    """Positions of the nodes of the main frame and of the inner frames that show in the window.
    `frames` maps the backend id of the element that contains such an inner frame to its id.
    """

    # backend id -> box, cut to the window; nodes outside are missing
    boxes: dict[int, Box] = field(default_factory=dict)
    # backend ids of all nodes that have a box, inside the window or not
    placed: set[int] = field(default_factory=set)
    frames: dict[int, str] = field(default_factory=dict)


def read_layout(snapshot: Json, width: int, height: int) -> Layout:
    """Read the positions from a result of DOMSnapshot.captureSnapshot.
    width, height: of the window in CSS pixels; boxes are cut to it.
    Boxes of inner frames are moved to the position of their frame and cut to it.
    """
    layout, documents, strings = Layout(), snapshot["documents"], snapshot["strings"]

    def read(index: int, frame: Box, ancestors: frozenset[int]) -> None:
        document = documents[index]
        ids = document["nodes"]["backendNodeId"]
        left, top = document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
        visible, placed = frame.cut(Box(0, 0, width, height)), document["layout"]
        for node, (x, y, w, h) in zip(placed["nodeIndex"], placed["bounds"], strict=True):
            box = Box(x - left + frame.x, y - top + frame.y, w, h)
            shown = box.cut(visible)
            layout.placed.add(ids[node])
            if not shown.empty:
                layout.boxes[ids[node]] = shown
            inner = contents.get((index, node))
            if inner is not None and inner not in ancestors and not shown.empty:
                layout.frames[ids[node]] = strings[documents[inner]["frameId"]]
                read(inner, box, ancestors | {inner})

    contents: dict[tuple[int, int], int] = {}
    for index, document in enumerate(documents):
        frames = document["nodes"].get("contentDocumentIndex", {"index": (), "value": ()})
        for node, inner in zip(frames["index"], frames["value"], strict=True):
            contents[index, node] = inner
    if documents:
        read(0, Box(0, 0, width, height), frozenset({0}))
    return layout


def read_page(
    trees: Mapping[str, list[Json]], layout: Layout, number: Callable[[int], int]
) -> tuple[list[str], list[Element]]:
    """Return the lines to print and their elements, both in page order.

    trees: accessibility nodes by frame id, the main frame's under "". number: backend id -> id to
    print.
    """
    lines: list[str] = []
    elements: list[Element] = []
    for depth, node in _shown("", trees, layout):
        role, name = _role(node), _name(node)
        # skip text that repeats an earlier line; text typed into a field has no box and stays
        backend = node["backendDOMNodeId"]
        if role == "StaticText" and backend in layout.placed and _repeats(name, lines):
            continue
        element = Element(number(backend), role, name, backend)
        properties = [
            f"{entry['name']}: {entry['value'].get('value', '')}"
            for entry in node.get("properties", ())
            if entry["name"] not in _HIDDEN_PROPERTIES
            and not entry["value"]["type"].startswith(("idref", "node"))
        ]
        lines.append("\t" * depth + " ".join([f"[{element.id}] {element}", *properties]))
        elements.append(element)
    return lines, elements


def _shown(
    frame: str, trees: Mapping[str, list[Json]], layout: Layout, depth: int = 0
) -> Iterator[tuple[int, Json]]:
    """Yield (depth, node) to print, of a frame and the frames in it; the children of a skipped node
    take its depth.
    A node without a box (an option of a select box, the text in a field) counts as inside the
    window if its parent is.
    """
    nodes = {node["nodeId"]: node for node in trees.get(frame, ())}
    stack = [(depth, node, True) for node in reversed(nodes.values()) if "parentId" not in node]
    while stack:
        level, node, parent_inside = stack.pop()
        role, backend = _role(node), node.get("backendDOMNodeId")
        if role in _DROPPED_ROLES:
            continue
        inside = backend in layout.boxes or (backend not in layout.placed and parent_inside)
        is_shown = inside and backend is not None and not node.get("ignored")
        if is_shown and _says_something(node, role):
            yield level, node
            level += 1
        if backend in layout.frames:
            yield from _shown(layout.frames[backend], trees, layout, level)
        children = [nodes[child] for child in node.get("childIds", ()) if child in nodes]
        if role == "MenuListPopup":
            children = children[:MAX_OPTIONS]
        stack.extend((level, child, inside) for child in reversed(children))


def _says_something(node: Json, role: str) -> bool:
    if _name(node).strip():
        return True
    more = any(entry["name"] not in _HIDDEN_PROPERTIES for entry in node.get("properties", ()))
    return role not in _EMPTY_ROLES or (more and role not in ("listitem", "MenuListPopup"))


def _role(node: Json) -> str:
    role = str(node.get("role", {}).get("value", ""))
    return _SPELLING.get(role, role)


def _name(node: Json) -> str:
    return str(node.get("name", {}).get("value", ""))[:MAX_NAME]


def _repeats(text: str, before: list[str]) -> bool:
    """Return True if one of the last three lines already shows this text."""
    printed = repr(text)[1:-1]
    return any(printed in earlier for earlier in before[-3:])


def cut_lines(lines: list[str], max_chars: int) -> str:
    """Return the lines that fit into max_chars as one text, plus a note if any is left out."""
    used = 0
    for count, line in enumerate(lines):
        used += len(line) + 1
        if used > max_chars:
            note = f"... {len(lines) - count} more lines, not shown"
            return "\n".join([*lines[:count], note])
    return "\n".join(lines)
