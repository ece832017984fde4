"""Batches made while earlier ones are learned from: in order, and only so many ahead."""

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
    """Fills batches one after another, in a thread that ends with this context.

    Batch b = 0, 1, ... is begun once at least b - `most` times was `admit`ted another: at most so
    many updates lie between its first turn and the update that learns from it.
    With `most` 0 there is no thread: a batch is filled by whoever takes it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._admitted = threading.Semaphore(most + 1)
        self._begun: deque[T] = deque()
        self._filled: SimpleQueue[T | BaseException] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._made: Iterator[T] = iter(())

    def begin(self, batches: Iterable[T], fill: Callable[[T], None]) -> None:
        """batches: empty ones, in order; fill: has deadlines of its own, so that `take` has one."""
        self._made = self._filling(batches, fill)
        if self._most:
            self._thread = threading.Thread(target=self._serve, name="ahead", daemon=True)
            self._thread.start()

    def take(self) -> T:
        """The next batch. Errors: what stopped its filling; no later one was begun."""
        if self._thread is None:
            made = next(self._made)
        else:
            filled = self._filled.get()
            if isinstance(filled, BaseException):
                raise filled
            made = filled
        self._begun.popleft()
        return made

    def admit(self) -> None:
        """A batch was learned from, and what samples the next turns knows it."""
        self._admitted.release()

    @property
    def begun(self) -> list[T]:
        """Those that nobody took yet, in order; the last one may be half filled."""
        return list(self._begun)

    def _filling(self, batches: Iterable[T], fill: Callable[[T], None]) -> Iterator[T]:
        for batch in batches:
            self._admitted.acquire()  # until another is admitted, or this ends
            if self._ended.is_set():
                return
            self._begun.append(batch)
            fill(batch)
            yield batch

    def _serve(self) -> None:
        try:
            for batch in self._made:
                self._filled.put(batch)
        except BaseException as error:  # whoever takes it raises it
            self._filled.put(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._admitted.release()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("what was made ahead did not end within %g s", CLOSE_TIMEOUT_S)
