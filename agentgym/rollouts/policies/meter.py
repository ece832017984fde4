"""Counters of an engine's work, for the policies that report it in `usage`."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentgym.types import EngineUsage


class Meter:
    """An accumulator of request counts over time; call `requests` at every change."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._num_running = self._num_waiting = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._busy_s = 0.0
        self._depth_s: dict[int, float] = {}

    def requests(self, *, running: int, waiting: int) -> None:
        """Record the number of running and of waiting requests from now on."""
        now = self._clock()
        elapsed_s, self._since = now - self._since, now
        if self._num_running:
            self._busy_s += elapsed_s
        self._depth_s[self._num_waiting] = self._depth_s.get(self._num_waiting, 0.0) + elapsed_s
        self._num_running, self._num_waiting = running, waiting

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count one prompt, whose first `num_cached` tokens had cached keys and values."""
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached

    def usage(self) -> EngineUsage:
        """Usage from the start until now."""
        self.requests(running=self._num_running, waiting=self._num_waiting)
        return EngineUsage(
            self._prompt_tokens, self._cached_tokens, self._busy_s, dict(self._depth_s)
        )
