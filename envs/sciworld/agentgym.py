"""Replies on the routes of AgentGym's own ScienceWorld server."""

from __future__ import annotations

from typing import Any

from envs.dialect import Dialect, Json, Place, whole


def _turn(env: Place) -> Json:
    numbers = {"reward": whole(env.reward), "score": whole(env.score)}
    return {"observation": env.observation, **numbers, "done": env.done}


def _detail(env: Place) -> Json:
    return {**env.opening, **_turn(env), "deleted": False}


def _state(simulator: Any, env: Place) -> Json:
    shown = ("freeActionLook", "freeActionInventory", "getGoalProgressStr")
    answers = simulator.ask(*shown, "getPossibleActions", "getPossibleObjects")
    look, inventory, goals, actions, objects = answers
    return {
        "observation": look,
        "inventory": inventory,
        "task_description": simulator.description,
        "goal_progress": goals,
        "possible_actions": actions.splitlines()[:10],
        "possible_objects": objects.splitlines()[:10],
        "current_moves": simulator.moves,
        "environment_info": _detail(env),
    }


def _hint(simulator: Any, _: Place) -> Json:
    actions, objects = simulator.ask("getPossibleActions", "getPossibleObjects")
    return {"possible_actions": actions.splitlines(), "possible_objects": objects.splitlines()}


def _visual(simulator: Any, answer: Json) -> Json:
    look, inventory = simulator.ask("freeActionLook", "freeActionInventory")
    info = {
        "moves": simulator.moves,
        "score": answer["score"],
        "reward": answer["reward"],
        "look": look,
        "inv": inventory,
        "taskDesc": simulator.description,
        "valid": simulator.hints(),
        "variationIdx": simulator.task.variation,
        "taskName": simulator.task.name,
        "simplificationStr": "",
    }
    shown = {"object_tree": simulator.tree(), "inventory": inventory, "moves": simulator.moves}
    return {**answer, "info": info, **shown}


DIALECT = Dialect(
    greeting="This is environment ScienceWorld.",
    shown=_detail,
    looked=lambda env: env.observation,
    stepped=_turn,
    opened=lambda simulator: {
        "task_name": simulator.task.name,
        "var_num": simulator.task.variation,
        "task_description": simulator.description,
        "observation": simulator.room,
        "score": float(simulator.score),
    },
    views={
        "detail": lambda _, env: _detail(env),
        "task_description": lambda simulator, _: {"task_description": simulator.description},
        "goals": lambda simulator, _: {"goals": simulator.ask("getGoalProgressStr")[0]},
        "object_tree": lambda simulator, _: {"object_tree": simulator.tree()},
        "action_hint": _hint,
        "state": _state,
    },
    visual=_visual,
)
