"""Batches generated while earlier ones are trained on: in order, and a limited number ahead."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class Ahead(Generic[T]):
    """A filler of batches, one after another, in a thread that ends with this context.

    Batch b = 0, 1, ... is started after at least b - `max_ahead` calls of `admit`: at most
    `max_ahead` updates lie between its first turn and the update that learns from it.
    With `max_ahead` 0 there is no thread: `take` fills the batch itself.
    """

    def __init__(self, max_ahead: int) -> None:
        self._most = max_ahead
        self._admitted = threading.Semaphore(max_ahead + 1)
        self._begun: deque[T] = deque()
        self._filled: SimpleQueue[T | BaseException] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._made: Iterator[T] = iter(())

    def begin(self, batches: Iterable[T], fill: Callable[[T], None]) -> None:
        """Start to fill batches.

        batches: empty batches, in order; fill: has its own deadlines, so that `take` has one.
        """
        self._made = self._filling(batches, fill)
        if self._most:
            self._thread = threading.Thread(target=self._serve, name="ahead", daemon=True)
            self._thread.start()

    def take(self) -> T:
        """Return the next batch. Errors: the error of its filling; no later batch was started."""
        if self._thread is None:
            batch = next(self._made)
        else:
            filled = self._filled.get()
            if isinstance(filled, BaseException):
                raise filled
            batch = filled
        self._begun.popleft()
        return batch

    def admit(self) -> None:
        """Let one more batch start; call it once the engine has the weights of an update."""
        self._admitted.release()

    @property
    def begun(self) -> list[T]:
        """Batches started and not yet consumed, oldest first; the last may be incomplete."""
        return list(self._begun)

    def _filling(self, batches: Iterable[T], fill: Callable[[T], None]) -> Iterator[T]:
        for batch in batches:
            self._admitted.acquire()  # returns after `admit` or `__exit__`
            if self._ended.is_set():
                return
            self._begun.append(batch)
            fill(batch)
            yield batch

    def _serve(self) -> None:
        try:
            for batch in self._made:
                self._filled.put(batch)
        except BaseException as error:  # `take` raises it
            self._filled.put(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._admitted.release()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("generation ahead did not end within %g s", CLOSE_TIMEOUT_S)
