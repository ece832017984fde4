"""How often a call is repeated and after how long, and how many are made in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

RETRIED = frozenset({408, 429, 500, 502, 503, 504})  # statuses after which asking again may help


@dataclass(frozen=True, slots=True)
class Retries:
    """Of one call: bounded in number and in time."""

    deadline_s: float = 120.0  # of all attempts together; an API server is restarted within
    request_s: float = 20.0  # of one attempt
    most: int = 24  # attempts
    first_s: float = 0.2  # before the second attempt; doubles
    longest_s: float = 10.0  # also the most a server's Retry-After is believed, times three

    def wait_s(self, attempt: int, retry_after_s: float, draw: float) -> float:
        """How long to wait after attempt number `attempt` (from 0). draw: uniform in [0, 1), so
        that clients turned away together do not come back together.
        """
        own = min(self.first_s * 2.0 ** min(attempt, 20), self.longest_s) * (0.5 + 0.5 * draw)
        told = min(retry_after_s, 3 * self.longest_s)
        return max(own, told * (1 + 0.25 * draw))

    def may_retry(self, status: int) -> bool:
        """status: 0 without an answer."""
        return status == 0 or status in RETRIED


def retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header; a date or nonsense counts as none."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


class RateLimiter:
    """At most `burst` at once and `per_s` in a second, however many threads ask."""

    def __init__(
        self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._lock = threading.Lock()
        self._free_at = clock()  # when all of the burst is free again

    def reserve_s(self) -> float:
        """Take a turn; the seconds until it comes."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + 1 / self._per_s
            return max(0.0, self._free_at - now - self._burst / self._per_s)
