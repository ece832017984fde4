"""The differences between AgentGym's environment servers: request bodies, replies and routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

Json = dict[str, Any]


class Reset(BaseModel):
    """Body of a reset. Further fields are ignored, as AgentGym's servers do."""

    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))
    data_idx: int = 0


class Nothing(BaseModel):
    """The model of a request without a body."""


@dataclass(slots=True)
class Place:
    """One environment of AgentGym's protocol: its id, and our session once an episode began."""

    id: int
    task: int | None  # index of the item, once it is known
    used: float
    session: str = ""  # our session id
    turn: int = 0
    observation: str = ""
    prompt: str = ""  # instructions and first observation
    reward: float = 0.0  # of the last turn
    score: float = 0.0  # sum of the rewards
    done: bool = False
    opening: Json = field(default_factory=dict)  # the simulator's fields about its task
    truncated: bool = False
    info: Json = field(default_factory=dict)  # of the last turn
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Dialect:
    """Replies and optional routes of AgentGym's server for one environment; see `envs.compat`."""

    greeting: str
    shown: Callable[[Place], Any]  # reply to a reset, and to GET /observation
    stepped: Callable[[Place], Json]
    create: type[BaseModel] = Nothing
    reset: type[BaseModel] = Reset
    created: Callable[[Place], Any] = lambda env: {"id": env.id}
    looked: Callable[[Place], Any] | None = None  # reply to GET /observation, if not `shown`
    detailed: Callable[[Place], Json] | None = None  # reply to GET /detail, if no simulator needed
    # body of a create -> the task it names
    names_task: Callable[[Any], int | None] = lambda body: None
    counts: bool = False  # create begins an episode; the server counts the task's index itself
    polite: bool = True  # errors have status 200
    # simulator -> further fields of `shown`; may hold another first observation and a score
    opened: Callable[[Any], Json] | None = None
    # GET route -> its reply while an episode runs
    views: Mapping[str, Callable[[Any, Place], Any]] = field(default_factory=dict)
    # POST /step_visual: simulator, answer to a step -> answer
    visual: Callable[[Any, Json], Json] | None = None
    closed: Callable[[bool], Any] = bool
    reset_failed: Json | None = None  # reply if a task cannot be opened
    # the error's text -> reply if a step crashes
    step_failed: Callable[[str], Json] | None = None


def common(greeting: str) -> Dialect:
    """Return the dialect that most of AgentGym's servers share. greeting: its reply to GET /."""
    return Dialect(greeting, lambda env: {**_turn(env), "deleted": False}, _turn)


def _turn(env: Place) -> Json:
    shown = ("observation", "reward", "score", "done")
    return {name: getattr(env, name) for name in shown}


def whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
