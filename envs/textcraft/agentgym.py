"""The routes of AgentGym's own TextCraft server."""

from __future__ import annotations

from pydantic import BaseModel

from envs.dialect import Dialect, Reset, whole


class TextCraftCreate(BaseModel):
    """Body of a create. It is required, but the reset that follows overrides its recipes."""

    commands: str | None = None
    goal: str | None = None


DIALECT = Dialect(
    greeting="This is environment TextCraft.",
    create=TextCraftCreate,
    reset=Reset,
    created=lambda env: {
        "id": env.id,
        "observation": env.observation,
        "done": False,
        "reward": 0,
    },
    shown=lambda env: {
        "id": env.id,
        "observation": env.observation,
        "done": env.done,
        "reward": whole(env.reward),
    },
    stepped=lambda env: {
        "observation": env.observation,
        "reward": whole(env.reward),
        "done": env.done,
    },
    looked=lambda env: env.observation,
    detailed=lambda env: {
        "observation": env.observation,
        "done": env.done,
        "reward": whole(env.reward),
        "deleted": False,
    },
    counts=True,
)
