"""The agent's view, equal to minigrid's `gen_obs` but without the five temporary grids that took
most of a step's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, OBJECT_TO_IDX
from minigrid.core.world_object import Wall
from minigrid.minigrid_env import MiniGridEnv

_OUTSIDE = Wall()
_EMPTY = bytes([OBJECT_TO_IDX["empty"], 0, 0])
_UNSEEN = bytes(3)


class Pictured(MiniGridEnv):  # type: ignore[misc]  # minigrid has no type annotations
    """A mixin with a faster `gen_obs`; put it before the minigrid level among a class's bases."""

    def gen_obs(self) -> dict[str, Any]:
        if self.see_through_walls:
            observation: dict[str, Any] = super().gen_obs()
            return observation
        return {"image": _picture(self), "direction": self.agent_dir, "mission": self.mission}


def _picture(env: MiniGridEnv) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the agent's view [S, S, 3]: (object, color, state) by column and row; zeros for a cell
    that the agent cannot see. The agent is in the middle of the last row, looking up.
    """
    size = env.agent_view_size
    cells = _cells(env, size)
    mask = _seen(cells, size)
    cells[_at(size // 2, size - 1, size)] = env.carrying  # shown in the agent's own cell
    encoded = bytearray()
    for thing, visible in zip(cells, mask, strict=True):
        encoded += bytes(thing.encode()) if visible and thing else _EMPTY if visible else _UNSEEN
    return np.frombuffer(encoded, dtype=np.uint8).reshape(size, size, 3)


def _at(column: int, row: int, size: int) -> int:
    return column * size + row


def _cells(env: MiniGridEnv, size: int) -> list[Any]:
    """Return the object in each cell of the agent's size x size view, column by column; None for
    an empty cell, a wall for a cell outside the grid.
    """
    things, width, height = env.grid.grid, env.grid.width, env.grid.height
    (ahead_x, ahead_y), (x, y) = map(int, env.dir_vec), map(int, env.agent_pos)
    cells = []
    for column in range(-(size // 2), size - size // 2):
        for row in range(size - 1, -1, -1):
            # to the right of (dx, dy) is (-dy, dx)
            at_x = x + row * ahead_x - column * ahead_y
            at_y = y + row * ahead_y + column * ahead_x
            inside = 0 <= at_x < width and 0 <= at_y < height
            cells.append(things[at_y * width + at_x] if inside else _OUTSIDE)
    return cells


def _seen(cells: list[Any], size: int) -> list[bool]:
    """Return a flag for each cell, True if it is visible. Starting at the agent's row, a visible
    cell that does not block the view makes its side neighbors and the three cells ahead visible.
    """
    visible = [False] * (size * size)
    visible[_at(size // 2, size - 1, size)] = True
    for row in range(size - 1, -1, -1):
        for columns, side in ((range(size - 1), size), (range(size - 1, 0, -1), -size)):
            for column in columns:
                here = _at(column, row, size)
                thing = cells[here]
                if not visible[here] or (thing is not None and not thing.see_behind()):
                    continue
                visible[here + side] = True
                if row > 0:
                    visible[here + side - 1] = visible[here - 1] = True
    return visible


_DOOR_STATES = ("open", "closed", "locked")


def grid_of(env: MiniGridEnv) -> dict[str, Any]:
    """Return the world from above in JSON types: width, height, mission, agent (x, y, direction: 0
    right, 1 down, 2 left, 3 up), carrying (or None), and things: x from the left, y from the top,
    kind, color, state.
    """
    width, height = int(env.grid.width), int(env.grid.height)
    things = [
        {"x": index % width, "y": index // width, **_named(thing)}
        for index, thing in enumerate(env.grid.grid)
        if thing is not None
    ]
    x, y = map(int, env.agent_pos)
    return {
        "width": width,
        "height": height,
        "mission": env.mission,
        "agent": {"x": x, "y": y, "direction": int(env.agent_dir)},
        "carrying": _named(env.carrying) if env.carrying else None,
        "things": things,
    }


def _named(thing: Any) -> dict[str, str]:
    kind, color, state = map(int, thing.encode())
    name = IDX_TO_OBJECT[kind]
    return {
        "kind": name,
        "color": IDX_TO_COLOR[color],
        "state": _DOOR_STATES[state] if name == "door" else "",
    }
