"""Limits on how often a call is repeated and after how long, and on the calls in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

RETRIED = frozenset({408, 429, 500, 502, 503, 504})  # statuses after which asking again may help


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits on the attempts of one call, in number and in time."""

    deadline_s: float = 120.0  # of all attempts together; an API server restarts faster
    request_s: float = 20.0  # of one attempt
    most: int = 24  # attempts
    first_s: float = 0.2  # before the second attempt; doubles
    longest_s: float = 10.0  # a server's Retry-After is honored up to three times this

    def wait_s(self, attempt: int, retry_after_s: float, draw: float) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 0).
        draw: uniform in [0, 1), so that clients refused together do not return together.
        """
        backoff_s = min(self.first_s * 2.0 ** min(attempt, 20), self.longest_s) * (0.5 + 0.5 * draw)
        requested_s = min(retry_after_s, 3 * self.longest_s)
        return max(backoff_s, requested_s * (1 + 0.25 * draw))

    def may_retry(self, status: int) -> bool:
        """Return True if another attempt may help. status: 0 without an answer."""
        return status == 0 or status in RETRIED


def retry_after_s(header: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 for a date or nonsense."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


class RateLimiter:
    """Limit of `burst` calls at once and `per_s` in a second, over all threads."""

    def __init__(
        self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._lock = threading.Lock()
        self._free_at = clock()  # when all of the burst is free again

    def reserve_s(self) -> float:
        """Reserve a turn and return the seconds until it comes."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + 1 / self._per_s
            return max(0.0, self._free_at - now - self._burst / self._per_s)
