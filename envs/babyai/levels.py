"""Which level and seed a task id names, and how its world is built."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers the levels)

from envs.babyai.picture import Pictured

# rejected layouts are reported with print(): a module attribute hides the builtin there, for all
# threads alike
_generator = importlib.import_module("minigrid.envs.babyai.core.roomgrid_level")
_generator.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]

# AgentGym's numbering: level = task id mod 40, seed = task id // 40
AGENTGYM_LEVELS: tuple[str, ...] = (
    "GoToRedBallGrey",
    "GoToRedBall",
    "GoToRedBallNoDists",
    "GoToObjS6-v0",
    "GoToLocalS8N7",
    "GoToObjMazeS7",
    "GoToImpUnlock",
    "GoToSeqS5R2",
    "GoToRedBlueBall",
    "GoToDoor",
    "GoToObjDoor",
    "Open",
    "OpenRedDoor",
    "OpenDoorLoc",
    "OpenRedBlueDoorsDebug",
    "OpenDoorsOrderN4Debug",
    "Pickup",
    "UnblockPickup",
    "PickupLoc",
    "PickupDistDebug",
    "PickupAbove",
    "PutNextLocalS6N4",
    "PutNextS7N4Carrying",
    "Unlock",
    "UnlockLocalDist",
    "KeyInBox",
    "UnlockPickupDist",
    "BlockedUnlockPickup",
    "UnlockToUnlock",
    "ActionObjDoor",
    "FindObjS7",
    "KeyCorridorS6R3",
    "OneRoomS20",
    "MoveTwoAcrossS8N9",
    "SynthS5R2",
    "SynthLoc",
    "SynthSeq",
    "MiniBossLevel",
    "BossLevel",
    "BossLevelNoUnlock",
)


def pick_level(levels: Sequence[str], task_id: int) -> tuple[str, int]:
    """(level, seed): neighbouring ids walk through the levels before the seed grows."""
    return levels[task_id % len(levels)], task_id // len(levels)


def check_level(name: str) -> None:
    """Errors: ValueError with the nearest known name."""
    known = _registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(f"babyai option levels: unknown level {name!r}; did you mean {near[0]!r}?")


def make_level(name: str) -> Any:
    """A fresh minigrid environment without gymnasium's wrappers; it must be reset with a seed
    before use.
    """
    return _registered()[name]()


def told_whole(levels: Sequence[str], task_id: int) -> str:
    """The world a task begins in: mission, size, agent, what it carries, and every cell.
    Many ids of a small level begin in one world.
    """
    level, seed = pick_level(levels, task_id)
    world = make_level(level)
    world.reset(seed=seed)
    agent = [*world.agent_pos, world.agent_dir, _told(world.carrying)]
    whole = [
        world.mission,
        world.width,
        world.height,
        agent,
        [_told(thing) for thing in world.grid.grid],
    ]
    world.close()
    return json.dumps(whole, default=int)  # numpy's whole numbers


def _told(thing: Any) -> Any:
    """Kind, colour, state, and what is inside; None: an empty cell."""
    return None if thing is None else [*thing.encode(), _told(thing.contains)]


@cache
def _registered() -> dict[str, Any]:
    """Short name -> maker. Of several versions of a level the newest has the short name."""
    makers: dict[str, Any] = {}
    specs = [spec for spec in gymnasium.registry.values() if spec.id.startswith("BabyAI-")]
    for spec in sorted(specs, key=lambda spec: spec.version or 0):
        makers[spec.name.removeprefix("BabyAI-")] = _maker(spec.entry_point, **spec.kwargs)
    # v0 was withdrawn: it was registered with the room size of S4 by mistake, and AgentGym's ids
    # mean that world
    makers["GoToObjS6-v0"] = _maker("minigrid.envs.babyai:GoToObj", room_size=4)
    return makers


def _maker(entry_point: str, **kwargs: Any) -> Any:
    module, _, name = entry_point.partition(":")
    level = getattr(importlib.import_module(module), name)
    world = type(name, (Pictured, level), {})
    return lambda: world(render_mode="rgb_array", **kwargs)
