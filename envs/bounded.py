"""A time limit for code that may loop forever and cannot be stopped from outside: run it in a
thread and raise an exception in that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RAISES = 5  # attempts to stop a thread by an exception
_GRACE_S = 0.2  # wait between two attempts


class OutOfTime(BaseException):
    """Exception raised inside the thread that ran out of time.
    It is a BaseException, so that `except Exception` in the stopped code does not catch it.
    """


class Unstoppable(RuntimeError):
    """The thread keeps running, for example inside a C call; do not use its objects again."""


async def run_bounded(work: Callable[[], T], timeout_s: float) -> T:
    """Return the result of `work()`, run in a new thread.

    Errors: those of `work`; TimeoutError if it was stopped after timeout_s; Unstoppable if it could
    not be stopped.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    gate = threading.Lock()
    finished = False

    def report(result: T | None, error: BaseException | None) -> None:
        if not outcome.done():
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        nonlocal finished
        result: T | None = None
        error: BaseException | None = None
        try:
            try:
                result = work()
            except Exception as raised:
                error = raised
            with gate:
                finished = True  # from now on the caller raises nothing in this thread
        except OutOfTime:
            finished = True
            error = TimeoutError()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(report, result, error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(asyncio.shield(outcome), timeout_s)
    except TimeoutError:
        if outcome.done():
            raise
    for _ in range(_RAISES):
        with gate:
            if not finished and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime)
                )
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(outcome), _GRACE_S)
        if outcome.done():
            raise TimeoutError
    raise Unstoppable(f"no answer within {timeout_s} s, and the thread could not be stopped")
