"""The routes of AgentGym's own TextCraft server."""

from __future__ import annotations

from pydantic import BaseModel

from envs.dialect import Dialect, Reset, whole


class TextCraftCreate(BaseModel):
    """A body is required; what it says about recipes is overruled by the reset that follows."""

    commands: str | None = None
    goal: str | None = None


DIALECT = Dialect(
    greeting="This is environment TextCraft.",
    create=TextCraftCreate,
    reset=Reset,
    created=lambda place: {
        "id": place.id,
        "observation": place.observation,
        "done": False,
        "reward": 0,
    },
    shown=lambda place: {
        "id": place.id,
        "observation": place.observation,
        "done": place.done,
        "reward": whole(place.reward),
    },
    stepped=lambda place: {
        "observation": place.observation,
        "reward": whole(place.reward),
        "done": place.done,
    },
    looked=lambda place: place.observation,
    detailed=lambda place: {
        "observation": place.observation,
        "done": place.done,
        "reward": whole(place.reward),
        "deleted": False,
    },
    counts=True,
)
