"""Number of servers that a number of episodes needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentgym.config import ConfigError

MIN_REPLICAS = 2  # one may be lost or moved while the other keeps serving


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sessions given to one server, if every session acts as soon as it is answered.
    It is half of what the pod admits (k8s/components), so that the sessions of a lost server find
    room.
    """

    sessions: int
    p99_ms: float  # upper bound for a step with so many on two cores; docs/results/capacity.md


CAPACITIES: Mapping[str, Capacity] = MappingProxyType(
    {
        "babyai": Capacity(sessions=128, p99_ms=125.0),
        "textcraft": Capacity(sessions=128, p99_ms=50.0),
        "searchqa": Capacity(sessions=128, p99_ms=50.0),
        "sciworld": Capacity(sessions=8, p99_ms=1000.0),
        "webarena": Capacity(sessions=8, p99_ms=1500.0),
    }
)


def replicas_for(env: str, episodes: int) -> int:
    """Return the number of servers for that many episodes in flight, at least MIN_REPLICAS.

    Errors: ConfigError for an environment whose capacity was not measured.
    """
    if env not in CAPACITIES:
        raise ConfigError(
            f"env.replicas auto: the capacity of a server of {env} is not known (known:"
            f" {', '.join(sorted(CAPACITIES))}); say how many servers"
        )
    return max(MIN_REPLICAS, math.ceil(episodes / CAPACITIES[env].sessions))
