"""The level and seed of each task id, and the construction of its world."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers the levels)

from envs.babyai.picture import Pictured
from envs.babyai.views import KEPT

# the generator reports rejected layouts with print(): a module attribute hides the builtin, in all
# threads
_generator = importlib.import_module("minigrid.envs.babyai.core.roomgrid_level")
_generator.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]

# AgentGym's numbering: level = task id mod 40, seed = task id // 40; five levels in a line
_LEVELS = """
    GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6-v0 GoToLocalS8N7
    GoToObjMazeS7 GoToImpUnlock GoToSeqS5R2 GoToRedBlueBall GoToDoor
    GoToObjDoor Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug
    OpenDoorsOrderN4Debug Pickup UnblockPickup PickupLoc PickupDistDebug
    PickupAbove PutNextLocalS6N4 PutNextS7N4Carrying Unlock UnlockLocalDist
    KeyInBox UnlockPickupDist BlockedUnlockPickup UnlockToUnlock ActionObjDoor
    FindObjS7 KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 SynthS5R2
    SynthLoc SynthSeq MiniBossLevel BossLevel BossLevelNoUnlock
"""
AGENTGYM_LEVELS = tuple(_LEVELS.split())


def pick_level(levels: Sequence[str], task_id: int) -> tuple[str, int]:
    """Return (level, seed): consecutive ids run through all levels before the seed grows."""
    return levels[task_id % len(levels)], task_id // len(levels)


def make_level(name: str) -> Any:
    """Return a new minigrid environment, without gymnasium's wrappers and not yet reset."""
    return registered()[name]()


def begin(name: str, seed: int) -> Any:
    """Return (level after its reset, image of that reset). Samples of an item begin in the same
    world: it is generated once, and copied in a fifth of that time.
    """
    return pickle.loads(_begun(name, seed))  # noqa: S301  (of this process)


@lru_cache(maxsize=KEPT)  # 6 kB each
def _begun(name: str, seed: int) -> bytes:
    level = make_level(name)
    image = level.reset(seed=seed)[0]["image"]
    del level.action_space, level.observation_space  # larger than the world, and not asked for
    return pickle.dumps((level, image))


def told_whole(levels: Sequence[str], task_id: int) -> str:
    """Return a task's initial world as JSON: mission, size, agent, carried object, and every cell.
    Many ids of a small level have the same initial world.
    """
    level, seed = pick_level(levels, task_id)
    world = make_level(level)
    world.reset(seed=seed)
    agent = [*world.agent_pos, world.agent_dir, _told(world.carrying)]
    cells = [_told(thing) for thing in world.grid.grid]
    state = [world.mission, world.width, world.height, agent, cells]
    world.close()
    return json.dumps(state, default=int)  # numpy's whole numbers


def _told(thing: Any) -> Any:
    """Return [kind, color, state, content] of a thing; None for an empty cell."""
    return None if thing is None else [*thing.encode(), _told(thing.contains)]


@cache
def registered() -> dict[str, Any]:
    """Return short level name -> function that makes the level in its newest version."""
    makers: dict[str, Any] = {}
    specs = [spec for spec in gymnasium.registry.values() if spec.id.startswith("BabyAI-")]
    for spec in sorted(specs, key=lambda spec: spec.version or 0):
        makers[spec.name.removeprefix("BabyAI-")] = _maker(spec.entry_point, **spec.kwargs)
    # v0 was withdrawn because it had the room size of S4 by mistake, but AgentGym's ids refer to
    # that world
    makers["GoToObjS6-v0"] = _maker("minigrid.envs.babyai:GoToObj", room_size=4)
    return makers


def _maker(entry_point: str, **kwargs: Any) -> Callable[[], Any]:
    module, _, name = entry_point.partition(":")
    if name not in globals():  # where `pickle` looks for it
        bases = Pictured, getattr(importlib.import_module(module), name)
        globals()[name] = type(name, bases, {"__module__": __name__})
    return partial(globals()[name], render_mode="rgb_array", **kwargs)
