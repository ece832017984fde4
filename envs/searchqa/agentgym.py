"""The routes of AgentGym's own SearchQA server."""

from __future__ import annotations

from pydantic import BaseModel, Field

from envs.dialect import Dialect


class SearchReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    # None: the one of the create request
    data_idx: int | None = Field(default=None, validation_alias="id")


class SearchCreate(BaseModel):
    id: int


DIALECT = Dialect(
    greeting="ok",
    create=SearchCreate,
    reset=SearchReset,
    names_task=lambda body: int(body.id),
    created=lambda env: env.id,
    shown=lambda env: env.prompt,
    stepped=lambda env: {
        "observation": env.observation,
        "reward": env.reward,
        "done": env.done,
        "info": None,
    },
    polite=False,
)
