"""Counts what an engine does, for the policies that say so in `usage`."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentgym.types import EngineUsage


class Meter:
    """Told of every change, it adds up what lay between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._num_running = self._num_waiting = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._busy_s = 0.0
        self._depth_s: dict[int, float] = {}

    def requests(self, *, running: int, waiting: int) -> None:
        """From now on so many are in work, and so many have not begun."""
        now = self._clock()
        passed, self._since = now - self._since, now
        if self._num_running:
            self._busy_s += passed
        self._depth_s[self._num_waiting] = self._depth_s.get(self._num_waiting, 0.0) + passed
        self._num_running, self._num_waiting = running, waiting

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """One was read; the engine had kept the keys and values of its first `num_cached`."""
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached

    def usage(self) -> EngineUsage:
        """Until now."""
        self.requests(running=self._num_running, waiting=self._num_waiting)
        return EngineUsage(
            self._prompt_tokens, self._cached_tokens, self._busy_s, dict(self._depth_s)
        )
