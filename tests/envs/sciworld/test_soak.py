"""A server of Java processes in long use: sessions open, close and expire, and processes are
killed.
"""

import asyncio
import os
import signal
import time

import psutil
import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from envs.sciworld.slots import IDLE_S, SLOTS_PER_JVM
from envs.sessions import POOL_THREADS
from envs.wire import CreateReply, CreateRequest

ACTIONS = ["open door to kitchen", "look around", "nonsense", "inventory", "go to kitchen"]
TTL_S = 5.0


class Tree:
    """Server process and its child processes."""

    def __init__(self, pid):
        self._server = psutil.Process(pid)

    def jvms(self):
        return self._server.children(recursive=True)

    def held(self):
        """Return (MiB of all, threads and descriptors of the server, number of processes)."""
        mib = sum(process.memory_info().rss for process in (self._server, *self.jvms())) / 2**20
        return mib, self._server.num_threads(), self._server.num_fds(), len(self.jvms())


async def visit(pool, first, count, at_once):
    """Play `count` sessions of five steps each. Return the number of lost sessions."""
    slots = asyncio.Semaphore(at_once)

    async def one(number):
        async with slots:
            try:
                async with pool.session(
                    Item("sciworld", number * 37 % 4639), f"key {number}"
                ) as session:
                    for action in ACTIONS:
                        reply = await session.step(action)
                        if reply.terminated or reply.truncated:
                            break
            except EnvError as error:
                if error.kind != "env_crashed":  # a typed error, never a reward
                    raise
                return 1
            return 0

    return sum(await asyncio.gather(*(one(number) for number in range(first, first + count))))


async def is_open(pool, num_sessions):
    deadline = time.monotonic() + 60
    while (await pool.info())[0].active_sessions < num_sessions:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def soak(endpoints, num_sessions, num_abandoned, num_kills, at_once):
    """Return the usage after the first sessions and at the end, and the number of lost sessions."""
    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        tree = Tree((await pool.info())[0].pid)
        fifth = max(num_sessions // 5, at_once)  # at least as many concurrent sessions as later
        playing = asyncio.create_task(visit(pool, 0, fifth, at_once))
        await is_open(pool, at_once - 1)  # this poll uses a separate connection, as later
        assert await playing == 0
        plateau, lost, number = tree.held(), 0, fifth
        for kill in range(num_kills):
            count = (num_sessions - fifth) // num_kills
            playing = asyncio.create_task(visit(pool, number, count, at_once))
            await is_open(pool, at_once - 1)
            jvms = tree.jvms()
            os.kill(jvms[kill % len(jvms)].pid, signal.SIGKILL)
            lost += await playing
            number += count
        for index in range(num_abandoned):
            await pool.client.ask(
                endpoints[0],
                "/create",
                CreateReply,
                CreateRequest(request_key=f"abandoned {index}", task_id=index),
            )
        deadline = time.monotonic() + 60
        while (await pool.info())[0].active_sessions:
            assert time.monotonic() < deadline, "abandoned sessions are not reaped"
            await asyncio.sleep(0.5)
        # idle processes, needed only by more concurrent sessions, end
        await asyncio.sleep(IDLE_S if num_sessions >= 1000 else 0)
        assert await visit(pool, number, fifth, at_once) == 0
        return plateau, tree.held(), lost, tree.jvms()


@pytest.mark.parametrize(
    ("num_sessions", "num_abandoned", "num_kills", "at_once"),
    [
        pytest.param(16, 2, 1, 4, marks=pytest.mark.slow),
        # two processes
        pytest.param(1000, 50, 5, 12, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_memory_threads_descriptors_and_processes_come_back(
    num_sessions, num_abandoned, num_kills, at_once, tmp_path
):
    max_sessions = 256 if at_once > SLOTS_PER_JVM else at_once + num_abandoned
    settings = EnvConfig(name="sciworld", max_sessions=max_sessions, session_ttl_s=TTL_S)
    with local_env(settings, expert=False, log_path=tmp_path / "log") as endpoints:
        plateau, end, lost, jvms = asyncio.run(
            soak(endpoints, num_sessions, num_abandoned, num_kills, at_once)
        )
    print(
        f"(MiB, threads, descriptors, Java processes): first {plateau}, in the end {end};"
        f" {lost} sessions lost"
    )
    assert 0 < lost <= num_kills * SLOTS_PER_JVM
    if num_sessions >= 1000:  # in a short run the Java compiler is still working
        assert end[3] <= plateau[3]
        assert end[0] <= 1.05 * plateau[0]
    extra = max(end[3] - plateau[3], 0)
    # the pool, asyncio's executor, the event loop and the owner watch
    assert end[1] <= POOL_THREADS + min(32, os.cpu_count() + 4) + 2
    # a lifeline and two pipes per game
    assert end[2] <= plateau[2] + (1 + 2 * SLOTS_PER_JVM) * extra
    _, left = psutil.wait_procs(jvms, timeout=20)
    assert not left
