"""SciWorld: elementary science, done in a simulated laboratory with text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from envs.env import EnvSpec
from envs.examples import recorded
from envs.options import choose, names, one_of, whole_number
from envs.sciworld.agentgym import DIALECT
from envs.sciworld.stock import make_pool
from envs.sciworld.tasks import PUBLISHED, VARIATIONS, find_task
from envs.sciworld.world import Options, Protocol, Reward, World

DEFAULTS: dict[str, Any] = {
    "tasks": "agentgym",
    "max_moves": 100,
    "reward": "normalised",
    "protocol": "own",
}

INSTRUCTIONS = """\
You are in a house with a laboratory and are given a science task. Rooms are joined by doors. Each \
turn, answer with one action:
look around, look at OBJECT, look in OBJECT, read OBJECT, inventory, task
go to ROOM, open OBJECT, close OBJECT (doors and containers too)
pick up OBJECT, put down OBJECT, move OBJECT to OBJECT, pour OBJECT into OBJECT, dunk OBJECT into \
OBJECT, mix OBJECT
activate OBJECT, deactivate OBJECT, use OBJECT, use OBJECT on OBJECT, connect OBJECT to OBJECT, \
disconnect OBJECT, eat OBJECT, flush OBJECT
focus on OBJECT - says that this is the one the task is about; focusing on a wrong one fails the \
task at once
wait - ten moves pass; wait1 - one move passes
An OBJECT is a name you were shown, if need be with its place: substance in metal pot. If several \
fit, you are asked which: answer with \
its number alone. There is a limit on moves."""


def spec(options: dict[str, Any]) -> EnvSpec:
    """Make the environment from its options: tasks, max_moves, reward, protocol (see the README).
    Errors: ValueError in one line, naming the key or value and the nearest known one, or a missing
    program and how to install it.
    """
    chosen = choose("sciworld", options, DEFAULTS)
    moves = whole_number("sciworld", chosen, "max_moves", 1)
    reward = one_of("sciworld", chosen, "reward", get_args(Reward))
    protocol = one_of("sciworld", chosen, "protocol", get_args(Protocol))
    tasks = PUBLISHED
    if chosen["tasks"] != "agentgym":
        tasks = names("sciworld", chosen, "tasks", "task", VARIATIONS, "boil")
    parsed = Options(tasks, moves, reward, protocol=protocol)
    pool = make_pool()
    served = EnvSpec(
        name="sciworld",
        dialect=DIALECT,
        instructions=INSTRUCTIONS,
        make=lambda: World(pool, parsed),
        options=chosen,
        probe_actions=("look around", "inventory", "no such action"),
        blocking=True,
        awaited=True,
        offers_hints=True,
        gauges={
            "env_jvms": ("Java processes", lambda: len(pool.pids)),
            "env_jvm_restarts": (
                "Java processes that were lost or replaced",
                lambda: pool.restarts,
            ),
            "env_engine_cpu_seconds": ("CPU seconds of the engine itself", lambda: pool.engine_s),
        },
        warm=pool.warm,
        examples=partial(recorded, Path(__file__).with_name("examples.json")),
        close=pool.close,
        identity=lambda task_id: str(find_task(parsed.tasks, task_id)),
    )
    agentgym_options = Options(
        PUBLISHED, DEFAULTS["max_moves"], "agentgym", paid_at_reset=True, protocol="agentgym"
    )
    return replace(served, agentgym=replace(served, make=lambda: World(pool, agentgym_options)))
