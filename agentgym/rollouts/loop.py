"""An event loop in a second thread, next to the one that trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentgym.models.model import set_threads

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """An event loop in its own thread; any thread may run coroutines in it, several at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        set_threads()  # torch keeps this setting per thread
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupted wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Cancel all running tasks and wait for their end. Errors: TimeoutError."""

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S)

        self.run(finish())

    def close(self) -> None:
        """Cancel all tasks and end the thread; wait at most CLOSE_TIMEOUT_S for either."""
        try:
            self.cancel()
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()
