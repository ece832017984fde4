"""Progress of training in turns played and in tokens: axes on which algorithms with different steps
can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.tracking.points import Point

PREFIX = "progress/"
TURNS, TOKENS = f"{PREFIX}turns", f"{PREFIX}tokens"
_PER_EPISODE = {TURNS: "rollout/turns_mean", TOKENS: "rollout/tokens_mean"}


def progressed(before: Sequence[Point], point: Point) -> dict[str, float]:
    """Return turns and tokens (observations and actions) of the episodes that count, so far.

    Empty if the point has no episodes. before: the run's training points so far, in order.
    """
    metric_of = point.metrics.get
    if metric_of("rollout/num_episodes") is None:
        return {}
    last = next((earlier.metrics for earlier in reversed(before) if TURNS in earlier.metrics), {})
    played = metric_of("rollout/num_episodes", 0.0) * (
        1.0 - metric_of("rollout/env_error_frac", 0.0)
    )
    return {
        name: last.get(name, 0.0) + round(played * metric_of(metric, 0.0))
        for name, metric in _PER_EPISODE.items()
    }
