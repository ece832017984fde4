"""The time limit stops Python code that never returns."""

import asyncio
import threading
import time

import pytest

from envs.bounded import Unstoppable, run_bounded


def test_a_result_and_an_error_come_through():
    assert asyncio.run(run_bounded(lambda: 3, 1.0)) == 3

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(run_bounded(fail, 1.0))


def test_a_loop_that_catches_exceptions_is_stopped_while_the_event_loop_stays_responsive():
    def spin():
        while True:
            try:
                sum(range(100))
            except Exception:
                continue

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        with pytest.raises(TimeoutError):
            await run_bounded(spin, 0.3)
        ticker.cancel()
        return ticks

    assert asyncio.run(main()) >= 5
    for thread in threading.enumerate():
        if thread.name == "bounded":  # it has reported, but may still be running
            thread.join(2)
            assert not thread.is_alive()


def test_a_timeout_raised_by_the_work_itself_is_not_waited_for():
    def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(run_bounded(fail, 5.0))


def test_what_cannot_be_stopped_is_reported():
    with pytest.raises(Unstoppable):
        asyncio.run(run_bounded(lambda: time.sleep(3), 0.05))
