"""The routes of AgentGym's own BabyAI server."""

from __future__ import annotations

from envs.dialect import Dialect, Nothing, Reset

DIALECT = Dialect(
    greeting="This is environment BabyAI.",
    create=Nothing,
    reset=Reset,
    created=lambda place: {"id": place.id},
    shown=lambda place: {
        "observation": place.observation,
        "reward": place.reward,
        "score": place.score,
        "deleted": False,
        "done": place.done,
    },
    stepped=lambda place: {
        "observation": place.observation,
        "reward": place.reward,
        "score": place.score,
        "done": place.done,
    },
)
