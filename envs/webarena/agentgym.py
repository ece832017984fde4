"""The routes of AgentGym's own WebArena server."""

from __future__ import annotations

from pydantic import BaseModel, Field

from envs.dialect import Dialect, Nothing


class WebArenaReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    seed: int = 0  # asked for and not used, as there
    data_idx: int = Field(validation_alias="idx")


DIALECT = Dialect(
    greeting="ok",
    create=Nothing,
    reset=WebArenaReset,
    created=lambda place: {"env_idx": place.id},
    shown=lambda place: {"observation": place.observation, **place.opening},
    stepped=lambda place: {
        "observation": place.observation,
        "reward": place.reward,
        "terminated": place.done and not place.truncated,
        "truncated": place.truncated,
        "info": place.info,
    },
    polite=False,
    looked=lambda place: place.observation,
    opened=lambda simulator: dict(simulator.about),
    closed=lambda closed: {"closed": "closed" if closed else "no such environment"},
    reset_failed={"observation": "TimeoutError", "sites": "Error", "object": "Error"},
    step_failed=lambda text: {
        "observation": text,
        "reward": 0,
        "terminated": False,
        "truncated": False,
        "info": {},
    },
)
