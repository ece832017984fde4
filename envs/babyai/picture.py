"""What an agent sees, as minigrid's `gen_obs` has it, without the five grids it builds on the way:
it was most of a step's time.
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


class Pictured(MiniGridEnv):  # type: ignore[misc]  # minigrid says nothing of its types
    """Stands before a minigrid level among the bases of a class."""

    def gen_obs(self) -> dict[str, Any]:
        if self.see_through_walls:
            whole: dict[str, Any] = super().gen_obs()
            return whole
        return {"image": _picture(self), "direction": self.agent_dir, "mission": self.mission}


def _picture(env: MiniGridEnv) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[S, S, 3] (object, color, state) of column and row; the agent in the middle of the last row,
    looking up.
    """
    size = env.agent_view_size
    cells = _cells(env, size)
    seen = _seen(cells, size)
    cells[_at(size // 2, size - 1, size)] = env.carrying  # is seen where the agent stands
    encoded = bytearray()
    for thing, visible in zip(cells, seen, strict=True):
        encoded += bytes(thing.encode()) if visible and thing else _EMPTY if visible else _UNSEEN
    return np.frombuffer(encoded, dtype=np.uint8).reshape(size, size, 3)


def _at(column: int, row: int, size: int) -> int:
    return column * size + row


def _cells(env: MiniGridEnv, size: int) -> list[Any]:
    """What stands in each cell, column by column; None: nothing."""
    things, width, height = env.grid.grid, env.grid.width, env.grid.height
    (ahead_x, ahead_y), (x, y) = map(int, env.dir_vec), map(int, env.agent_pos)
    found = []
    for column in range(-(size // 2), size - size // 2):
        for row in range(size - 1, -1, -1):
            # to the right of (dx, dy) is (-dy, dx)
            at_x = x + row * ahead_x - column * ahead_y
            at_y = y + row * ahead_y + column * ahead_x
            inside = 0 <= at_x < width and 0 <= at_y < height
            found.append(things[at_y * width + at_x] if inside else _OUTSIDE)
    return found


def _seen(cells: list[Any], size: int) -> list[bool]:
    """Which cells the agent sees: from its own row on, each that is seen and hides nothing shows
    its neighbours to the side and the three ahead of it.
    """
    seen = [False] * (size * size)
    seen[_at(size // 2, size - 1, size)] = True
    for row in range(size - 1, -1, -1):
        for columns, side in ((range(size - 1), size), (range(size - 1, 0, -1), -size)):
            for column in columns:
                here = _at(column, row, size)
                thing = cells[here]
                if not seen[here] or (thing is not None and not thing.see_behind()):
                    continue
                seen[here + side] = True
                if row > 0:
                    seen[here + side - 1] = seen[here - 1] = True
    return seen


_DOOR_STATES = ("open", "closed", "locked")


def grid_of(env: MiniGridEnv) -> dict[str, Any]:
    """The world from above, in JSON types: what stands where, columns from the left and rows from
    the top, and where the agent is and looks (0 right, 1 down, 2 left, 3 up).
    """
    width, height = int(env.grid.width), int(env.grid.height)
    things = [
        {"x": place % width, "y": place // width, **_named(thing)}
        for place, thing in enumerate(env.grid.grid)
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
