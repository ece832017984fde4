"""Prometheus metrics of an environment server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Metrics of one server, in their own registry.

    gauges: those of the environment, see `EnvSpec`. num_active: returns how many sessions are open.
    """

    def __init__(
        self, gauges: Mapping[str, tuple[str, Callable[[], float]]], num_active: Callable[[], float]
    ) -> None:
        registry = self.registry = CollectorRegistry()
        Gauge("env_sessions_active", "Open sessions", registry=registry).set_function(num_active)
        self.created = Counter("env_sessions_created", "Sessions opened", registry=registry)
        idle = "Sessions closed because they were idle too long"
        self.reaped = Counter("env_sessions_reaped", idle, registry=registry)
        refused = "Sessions refused: full or draining"
        self.rejected = Counter("env_sessions_rejected", refused, registry=registry)
        self.steps = Counter("env_steps", "Actions carried out", registry=registry)
        self.errors = Counter("env_errors", "Error replies", ["kind"], registry=registry)
        buckets = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
        took = "Time the simulator took for one action"
        self.step_seconds = Histogram("env_step_seconds", took, buckets=buckets, registry=registry)
        for name, (meaning, value) in gauges.items():
            Gauge(name, meaning, registry=registry).set_function(value)
