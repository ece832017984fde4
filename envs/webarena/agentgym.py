"""The routes of AgentGym's own WebArena server."""

from __future__ import annotations

from pydantic import BaseModel, Field

from envs.dialect import Dialect, Nothing


class WebArenaReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    seed: int = 0  # accepted and not used, as in AgentGym's server
    data_idx: int = Field(validation_alias="idx")


DIALECT = Dialect(
    greeting="ok",
    create=Nothing,
    reset=WebArenaReset,
    created=lambda environment: {"env_idx": environment.id},
    shown=lambda environment: {"observation": environment.observation, **environment.opening},
    stepped=lambda environment: {
        "observation": environment.observation,
        "reward": environment.reward,
        "terminated": environment.done and not environment.truncated,
        "truncated": environment.truncated,
        "info": environment.info,
    },
    polite=False,
    looked=lambda environment: environment.observation,
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
