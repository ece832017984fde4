"""The agent's view, equal to minigrid's `gen_obs` but without the five temporary grids that took
most of a step's time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, OBJECT_TO_IDX
from minigrid.core.world_object import Wall
from minigrid.minigrid_env import MiniGridEnv

from envs.babyai.views import DOOR_STATES, KEPT

_OUTSIDE = Wall()
_EMPTY = bytes([OBJECT_TO_IDX["empty"], 0, 0])


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
    size, grid, (x, y) = env.agent_view_size, env.grid, map(int, env.agent_pos)
    things = [*grid.grid, _OUTSIDE]
    indices = _indices(size, grid.width, grid.height, x, y, int(env.agent_dir))
    cells = [things[index] for index in indices]
    visible = _seen(size, tuple([thing is None or thing.see_behind() for thing in cells]))
    cells[size * (size // 2 + 1) - 1] = env.carrying  # shown in the agent's own cell
    encoded = bytearray(len(cells) * 3)
    for index in visible:
        thing = cells[index]
        encoded[3 * index : 3 * index + 3] = bytes(thing.encode()) if thing else _EMPTY
    return np.frombuffer(encoded, dtype=np.uint8).reshape(size, size, 3)


@lru_cache(maxsize=KEPT)
def _indices(size: int, width: int, height: int, x: int, y: int, facing: int) -> tuple[int, ...]:
    """Return the index in the grid of each cell of a size x size view, column by column; -1 for a
    cell outside the grid. facing: 0 right, 1 down, 2 left, 3 up.
    """
    ahead_x, ahead_y = ((1, 0), (0, 1), (-1, 0), (0, -1))[facing]
    indices = []
    for column in range(-(size // 2), size - size // 2):
        for row in range(size - 1, -1, -1):
            # to the right of (dx, dy) is (-dy, dx)
            at_x = x + row * ahead_x - column * ahead_y
            at_y = y + row * ahead_y + column * ahead_x
            inside = 0 <= at_x < width and 0 <= at_y < height
            indices.append(at_y * width + at_x if inside else -1)
    return tuple(indices)


@lru_cache(maxsize=KEPT)
def _seen(size: int, clear: tuple[bool, ...]) -> list[int]:
    """Return the indices of the visible cells. Starting at the agent's row, a visible cell that
    does not block the view makes its side neighbors and the three cells ahead visible.
    clear: flags of the cells that do not block the view.
    """
    visible = [False] * (size * size)
    visible[size * (size // 2 + 1) - 1] = True
    for row in range(size - 1, -1, -1):
        for columns, side in ((range(size - 1), size), (range(size - 1, 0, -1), -size)):
            for column in columns:
                here = column * size + row
                if not visible[here] or not clear[here]:
                    continue
                visible[here + side] = True
                if row > 0:
                    visible[here + side - 1] = visible[here - 1] = True
    return [index for index, is_visible in enumerate(visible) if is_visible]


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
    condition = DOOR_STATES[state] if name == "door" else ""
    return {"kind": name, "color": IDX_TO_COLOR[color], "state": condition}
