"""A server in long use: resources of sessions are freed, also of sessions that no client closed."""

import asyncio
import time

import psutil
import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from envs.wire import CreateReply, CreateRequest

pytestmark = pytest.mark.integration

ACTIONS = {
    "babyai": ["turn left", "move forward", "pickup", "nonsense", "turn right"],
    "textcraft": [
        "get 1 oak log",
        "inventory",
        "craft 4 oak planks using 1 oak log",
        "nonsense",
        "get 2 string",
    ],
    "sciworld": ["open door to kitchen", "look around", "nonsense", "inventory", "pick up agent"],
    "searchqa": [
        "<search>a lake</search>",
        "nonsense",
        "<search>river town</search>",
        "<think>",
        "<search>who founded it</search>",
    ],
}
TTL_S = 4.0
CONCURRENCY = 32


class Held:
    """Resources that a process uses."""

    def __init__(self, pid):
        self._process = psutil.Process(pid)

    def now(self):
        return (
            self._process.memory_info().rss / 2**20,
            self._process.num_threads(),
            self._process.num_fds(),
        )


async def visit(pool, env, first, count):
    """Play `count` sessions of five steps each, CONCURRENCY at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(number):
        async with slots, pool.session(Item(env, number % 997), f"key {number}") as session:
            for action in ACTIONS[env]:
                reply = await session.step(action)
                if reply.terminated or reply.truncated:
                    break

    await asyncio.gather(*(one(number) for number in range(first, first + count)))


async def abandon(pool, endpoint, count, wave):
    """Open `count` sessions at once, leave them, and wait until the server has closed them."""
    for number in range(count):
        await pool.client.ask(
            endpoint,
            "/create",
            CreateReply,
            CreateRequest(request_key=f"abandoned {wave} {number}", task_id=number),
        )
    assert (await pool.info())[0].active_sessions > 0
    deadline = time.monotonic() + 10 * TTL_S
    while (await pool.info())[0].active_sessions:
        assert time.monotonic() < deadline, "abandoned sessions are not reaped"
        await asyncio.sleep(0.5)


async def soak(env, endpoints, num_sessions, num_abandoned):
    """Return the usage after a fifth of the sessions and at the end; both times after the highest
    number of concurrent sessions.

    An allocator keeps the peak's memory; a leak adds to that.
    """
    async with EnvPool(endpoints, request_timeout_s=60) as pool:
        held = Held((await pool.info())[0].pid)
        await visit(pool, env, 0, num_sessions // 5)
        print(
            f"{env}: {held.now()[0]:.1f} MiB after {num_sessions // 5} sessions, {CONCURRENCY} at"
            " once"
        )
        await abandon(pool, endpoints[0], num_abandoned, 1)
        plateau = held.now()
        await visit(pool, env, num_sessions // 5, num_sessions - num_sessions // 5)
        await abandon(pool, endpoints[0], num_abandoned, 2)
        await visit(pool, env, num_sessions, num_sessions // 20)
        return plateau, held.now()


@pytest.mark.parametrize(
    ("env", "num_sessions", "num_abandoned"),
    [
        pytest.param("textcraft", 1000, 200, marks=pytest.mark.slow),
        *(
            pytest.param(env, 10_000, 2_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for env in ACTIONS
        ),
    ],
)
def test_memory_threads_and_descriptors_come_back(env, num_sessions, num_abandoned, tmp_path):
    settings = EnvConfig(name=env, max_sessions=4096, session_ttl_s=TTL_S)
    with local_env(settings, expert=False, log_path=tmp_path / "log") as endpoints:
        (plateau_mib, threads, files), (end_mib, threads_left, files_left) = asyncio.run(
            soak(env, endpoints, num_sessions, num_abandoned)
        )
    print(
        f"{env}: {plateau_mib:.1f} MiB after {num_abandoned} at once, {end_mib:.1f} after"
        f" {num_sessions} more and as many at once again"
    )
    assert end_mib <= 1.05 * plateau_mib
    assert threads_left <= threads
    assert files_left <= files
