"""An event loop beside the thread that trains."""

import asyncio
import threading
import time

import pytest

from agentgym.rollouts.loop import LoopThread


@pytest.fixture
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


def test_several_threads_run_coroutines_in_one_other_thread(loop):
    async def where():
        await asyncio.sleep(0)
        return threading.current_thread().name

    found = []
    threads = [threading.Thread(target=lambda: found.append(loop.run(where()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == ["engine"] * 4


def test_an_error_reaches_whoever_waits(loop):
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fail())


def test_what_still_runs_is_ended_and_who_waits_for_it_hears_of_it(loop):
    began, ended = threading.Event(), []

    async def endless():
        began.set()
        await asyncio.sleep(3600)

    def wait():
        try:
            loop.run(endless())
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(10)
    loop.cancel()
    thread.join(10)
    assert ended == ["CancelledError"]


def test_closing_ends_the_thread():
    before = threading.active_count()
    loop = LoopThread()
    loop.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
