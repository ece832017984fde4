"""A time limit for code that may loop for ever and offers no way to stop it: run it in a thread
and raise into that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RAISES = 5  # attempts to stop a thread
_GRACE_S = 0.2  # it gets between two attempts


class OutOfTime(BaseException):
    """Raised inside the thread.
    Not an Exception, so that `except Exception` in the code being stopped lets it pass.
    """


class Unstoppable(RuntimeError):
    """The thread runs on, for example inside a C call: what it works on must not be used again."""


async def run_bounded(work: Callable[[], T], timeout_s: float) -> T:
    """The result of `work()`, run in a thread of its own.

    Errors: what `work` raises; TimeoutError where it was stopped after timeout_s; Unstoppable where
    it could not be.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    gate = threading.Lock()
    finished = False

    def report(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

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
                finished = True  # from here on nothing is raised into this thread
        except OutOfTime:
            finished = True
            error = TimeoutError()
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(report, result, error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(asyncio.shield(done), timeout_s)
    except TimeoutError:
        if done.done():
            raise
    for _ in range(_RAISES):
        with gate:
            if not finished and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime)
                )
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(done), _GRACE_S)
        if done.done():
            raise TimeoutError
    raise Unstoppable(f"no answer within {timeout_s} s, and the thread could not be stopped")
