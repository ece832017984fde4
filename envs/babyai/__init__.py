"""BabyAI on minigrid: instruction following in a grid world, described as text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args, get_type_hints

from envs.babyai.levels import AGENTGYM_LEVELS, registered, told_whole
from envs.babyai.world import Options, World
from envs.dialect import common
from envs.env import EnvSpec
from envs.examples import played, solved
from envs.options import choose, names, one_of
from envs.wire import Example

DEFAULTS: dict[str, Any] = {
    "levels": ["GoToObj", "GoToRedBallNoDists"],
    "view": "compact",
    "actions": "low",
    "reward": "binary",
}

_LOW_INSTRUCTIONS = """\
Each turn, answer with one of these actions:
turn left, turn right - turn a quarter on the spot
move forward - one cell, if nothing is in the way
pickup - take the ball, box or key right in front of you; you can carry one thing
drop - put what you carry on the free cell in front of you
toggle - open or close the door in front of you (a locked one needs the key of its colour in your \
hands), or open a box"""

_HIGH_INSTRUCTIONS = """\
Each turn, answer with one of these actions. Objects of the same name are numbered from 1, the \
nearest first.
turn left, turn right - turn a quarter on the spot
move forward - one cell, if nothing is in the way
go to <color> <object> <number> - walk up to something you see, for example: go to red ball 1
pickup <color> <object> <number> - walk up to a ball, box or key and take it; you can carry one \
thing
drop - put what you carry on the free cell in front of you
toggle - open or close the door in front of you, or open a box
go through <color> open door <number> - walk into an open doorway
toggle and go through <color> closed door <number> - open it and walk into the doorway; if locked, \
say locked and carry the key of its color
check available actions - list what is possible now"""

_COMPACT_INSTRUCTIONS = """\
The first observation names your goal. After that you are told what you see, nearest first, as \
steps ahead of you and to your left or right.
'carry' is what you hold. 'invalid action' means your last answer was not understood or cannot be \
done, and nothing happened."""

_AGENTGYM_INSTRUCTIONS = """\
The first observation names your goal. After that you are told what you see, how far the wall or box
ahead of you is, what you carry and which actions are available. If an action cannot be done, you \
are told why and what is available."""

# worked examples: (level, seed); the seeds of item lists are below 10,000
TASKS = (("GoToObj", 1_000_000_003), ("PickupDist", 1_000_000_001))


@cache
def worked_examples(options: Options) -> tuple[Example, ...]:
    """Play the worked examples with these options' view and actions; leave out unsolved ones."""
    return solved(
        partial(played, World(replace(options, levels=(level,))), seed) for level, seed in TASKS
    )


def spec(options: dict[str, Any]) -> EnvSpec:
    """Make the environment from its options: levels (list of names, or "agentgym"), view, actions,
    reward (see the README).
    Errors: ValueError naming the key or value and the nearest known one.
    """
    chosen = choose("babyai", options, DEFAULTS)
    types = get_type_hints(Options)
    for key in ("view", "actions", "reward"):
        one_of("babyai", chosen, key, get_args(types[key]))
    levels = AGENTGYM_LEVELS
    if chosen["levels"] != "agentgym":
        levels = names("babyai", chosen, "levels", "level", registered(), "GoToObj")
    parsed = Options(levels, chosen["view"], chosen["actions"], chosen["reward"])
    served = _served(chosen, parsed)
    agentgym_options = Options(AGENTGYM_LEVELS, "agentgym", "high", "minigrid", limited=False)
    return replace(served, agentgym=_served({**DEFAULTS, "levels": "agentgym"}, agentgym_options))


def _served(chosen: dict[str, Any], parsed: Options) -> EnvSpec:
    instructions = (
        (
            "You are in a grid of rooms and follow an instruction. You look one way and see up to"
            " six cells ahead, never through walls."
        ),
        _COMPACT_INSTRUCTIONS if parsed.view == "compact" else _AGENTGYM_INSTRUCTIONS,
        _LOW_INSTRUCTIONS if parsed.actions == "low" else _HIGH_INSTRUCTIONS,
    )
    return EnvSpec(
        name="babyai",
        dialect=common("This is environment BabyAI."),
        instructions="\n".join(instructions),
        make=lambda: World(parsed),
        options=chosen,
        offers_hints=True,
        probe_actions=("turn left", "turn right", "move forward"),
        examples=partial(worked_examples, parsed),
        identity=lambda task_id: told_whole(parsed.levels, task_id),
    )
