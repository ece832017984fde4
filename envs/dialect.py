"""An environment as AgentGym's own server speaks of it: what differs between its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

Json = dict[str, Any]


class Reset(BaseModel):
    """Further fields are ignored, as AgentGym's servers do."""

    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))
    data_idx: int = 0


class Nothing(BaseModel):
    """No body is expected."""


@dataclass(slots=True)
class Place:
    """One of AgentGym's environments: an id, and since its reset a session."""

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
    opening: Json = field(default_factory=dict)  # what the simulator tells of its task
    truncated: bool = False
    info: Json = field(default_factory=dict)  # of the last turn
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Dialect:
    """Routes of AgentGym's own server of an environment: `envs.compat` mounts them."""

    greeting: str
    create: type[BaseModel]
    reset: type[BaseModel]
    created: Callable[[Place], Any]
    shown: Callable[[Place], Any]  # after reset, and to GET /observation
    stepped: Callable[[Place], Json]
    looked: Callable[[Place], Any] | None = None  # to GET /observation, where that is not `shown`
    detailed: Callable[[Place], Json] | None = None  # to GET /detail, where that needs no simulator
    # of a create's body: the task it names
    names_task: Callable[[Any], int | None] = lambda body: None
    counts: bool = False  # create begins an episode, of an index the server counts itself
    polite: bool = True  # errors have status 200
    # simulator -> what else `shown` tells; maybe another first observation, and a score
    opened: Callable[[Any], Json] | None = None
    # GET route -> what it shows while an episode runs
    views: Mapping[str, Callable[[Any, Place], Any]] = field(default_factory=dict)
    # POST /step_visual: simulator, answer to a step -> answer
    visual: Callable[[Any, Json], Json] | None = None
    closed: Callable[[bool], Any] = bool
    reset_failed: Json | None = None  # answered where a task cannot be opened
    # answered where a step crashes, from the error's text
    step_failed: Callable[[str], Json] | None = None


def common(greeting: str) -> Dialect:
    """What most of AgentGym's servers have alike; of an environment that AgentGym has not, too."""
    return Dialect(
        greeting=greeting,
        create=Nothing,
        reset=Reset,
        created=lambda place: {"id": place.id},
        shown=lambda place: {**_turn(place), "deleted": False},
        stepped=_turn,
    )


def _turn(place: Place) -> Json:
    return {
        "observation": place.observation,
        "reward": place.reward,
        "score": place.score,
        "done": place.done,
    }


def whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
