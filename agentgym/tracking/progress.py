"""How far training has come in what it costs: turns played, tokens. Axes on which algorithms that
take other steps lie over each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.tracking.points import Point

PREFIX = "progress/"
TURNS, TOKENS = f"{PREFIX}turns", f"{PREFIX}tokens"
_PER_EPISODE = {TURNS: "rollout/turns_mean", TOKENS: "rollout/tokens_mean"}


def progressed(before: Sequence[Point], point: Point) -> dict[str, float]:
    """Turns and tokens (observations and actions) of the episodes that count, up to this point;
    empty where it has no episodes. before: the run's training points so far, in order.
    """
    had = point.metrics.get
    if had("rollout/num_episodes") is None:
        return {}
    last = next((each.metrics for each in reversed(before) if TURNS in each.metrics), {})
    played = had("rollout/num_episodes", 0.0) * (1.0 - had("rollout/env_error_frac", 0.0))
    return {
        name: last.get(name, 0.0) + round(played * had(metric, 0.0))
        for name, metric in _PER_EPISODE.items()
    }
