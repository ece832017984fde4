"""Games that share a process have separate worlds, and a lost process ends only the games in it."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from envs.sciworld import slots
from envs.sciworld.gold import solution
from envs.sciworld.jvm import GameFailed, JvmLost
from envs.sciworld.slots import SlotPool
from envs.sciworld.tasks import PUBLISHED, VARIATIONS, Task
from tests.completed import completed
from tests.waiting import wait_until

# 46 games
GAMES = [Task(name, variation) for name in PUBLISHED for variation in (0, VARIATIONS[name] // 2)]


def actions_of(task, limit):
    """Return the recorded solution, or a walk if there is none."""
    return (
        solution(task)
        or [
            "look around",
            "wait1",
            "inventory",
            "open door to hallway",
            "go to hallway",
            "look around",
        ]
    )[:limit]


def alone(pool, task, limit):
    slot = pool.acquire()
    told = [slot.call("l", task.name, str(task.variation))]
    told += [slot.call("s", action) for action in actions_of(task, limit)]
    pool.release(slot)
    return told


def interleaved(pool, tasks, limit, seed):
    """Play all games at the same time, in random order, from several threads."""
    chance = random.Random(seed)
    with ThreadPoolExecutor(8) as threads:
        open_slots = list(threads.map(lambda _: pool.acquire(), tasks))
        loaded = threads.map(
            lambda pair: pair[0].call("l", pair[1].name, str(pair[1].variation)),
            zip(open_slots, tasks, strict=True),
        )
        told = [[texts] for texts in loaded]
        waiting = {number: actions_of(task, limit) for number, task in enumerate(tasks)}

        def play(number):
            told[number].append(open_slots[number].call("s", waiting[number].pop(0)))

        while waiting:
            numbers = list(waiting)
            chance.shuffle(numbers)
            list(threads.map(play, numbers))
            waiting = {number: left for number, left in waiting.items() if left}
    for slot in open_slots:
        pool.release(slot)
    return told


ELSEWHERE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_slots import GAMES, interleaved
from envs.sciworld.slots import SlotPool
pool = SlotPool(slots_per_jvm=5)
json.dump(interleaved(pool, GAMES[int(sys.argv[2])::int(sys.argv[3])], int(sys.argv[4]), 2), \
sys.stdout)
pool.close()
"""


def check_isolation(step, limit):
    tasks = GAMES[::step]
    pool = SlotPool()
    try:
        expected = [alone(pool, task, limit) for task in tasks]
        again = interleaved(pool, tasks, limit, seed=1)
    finally:
        pool.close()
    assert again == expected
    command = [
        sys.executable,
        "-c",
        ELSEWHERE,
        os.path.dirname(__file__),
        "0",
        str(step),
        str(limit),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = completed(*command, timeout=900, env=environment, check=True)
    assert json.loads(done.stdout) == [[list(texts) for texts in told] for told in expected]


@pytest.mark.slow
def test_games_interleaved_over_slots_are_the_games_alone_also_in_another_process():
    check_isolation(step=8, limit=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_46_games_interleaved_are_the_games_alone_also_in_another_process():
    check_isolation(step=1, limit=200)


def test_a_slot_is_used_again_and_the_last_one_first(pool):
    first, second = pool.acquire(), pool.acquire()
    assert first is not second
    pool.release(first)
    pool.release(second)
    assert pool.acquire() is second
    pool.release(second)
    assert len(pool.pids) == 1


@pytest.mark.slow
def test_a_warm_pool_opens_four_games_for_a_fraction_of_what_a_cold_one_takes():
    def open_four(pool):
        before = pool.engine_s
        with ThreadPoolExecutor(4) as threads:
            held = list(threads.map(lambda _: pool.acquire(), range(4)))
            list(
                threads.map(
                    lambda slot, task: slot.call("l", task.name, str(task.variation)),
                    held,
                    GAMES[1::12],
                )
            )
        return pool.engine_s - before

    cold, warm = SlotPool(slots_per_jvm=4), SlotPool(slots_per_jvm=4)
    try:
        warm.warm(256)
        (pid,) = warm.pids
        assert open_four(warm) < open_four(cold) / 3
        assert warm.pids == [pid]
    finally:
        cold.close()
        warm.close()


def test_no_more_games_are_warmed_than_may_be_open(small):
    small.warm(1)
    (process,) = small._processes
    assert [slot.open for slot in process.free] == [False, True]  # the next game gets the last slot


def test_loading_twice_is_loading_once(pool):
    """Loading is idempotent, because the engine's client loads each task twice."""
    slot = pool.acquire()
    once = slot.call("l", "boil", "3")
    assert slot.call("l", "boil", "3") == once
    pool.release(slot)


@pytest.fixture
def small():
    """Yield a pool with two games per process."""
    pool = SlotPool(slots_per_jvm=2)
    yield pool
    pool.close()


def test_a_killed_process_ends_its_own_games_and_is_replaced(small):
    held = [small.acquire() for _ in range(3)]
    for slot in held:
        slot.call("l", "boil", "0")
    assert len(small.pids) == 2
    os.kill(small.pids[0], signal.SIGKILL)
    for slot in held[:2]:
        with pytest.raises(JvmLost, match="ended with code -9"):
            slot.call("s", "look around")
        small.release(slot)
    assert held[2].call("s", "look around")[0]
    fresh = small.acquire()
    assert fresh.call("l", "boil", "0")
    assert small.restarts == 1


def test_a_game_in_which_the_engine_asks_for_exit_ends_alone(small):
    broken, other = small.acquire(), small.acquire()
    other.call("l", "boil", "0")
    with pytest.raises(GameFailed, match="the engine asked for exit 0"):
        broken.call("a", "shutdown")
    assert other.call("s", "look around")[0]
    small.release(broken)
    assert small.acquire() is not broken  # a slot with unread output is not used again
    assert small.restarts == 0


def test_a_game_that_gives_no_answer_is_ended_with_its_process():
    pool = SlotPool(slots_per_jvm=2, call_timeout_s=30)
    try:
        slot = pool.acquire()
        slot.call("l", "boil", "0")
        pool._call_timeout_s = 0.05
        with pytest.raises(JvmLost, match=r"gave no answer within 0\.05 s"):
            slot.call("g", "boil", "1")  # the engine searches for a solution for seconds
        assert not psutil.pid_exists(slot.process.jvm.pid)
    finally:
        pool.close()


def test_games_awaited_at_once_are_the_games_alone(pool):
    tasks = GAMES[::12]
    expected = [alone(pool, task, 6) for task in tasks]

    async def play(slot, task):
        told = [(await slot.call_async("l", task.name, str(task.variation)))]
        return told + [(await slot.call_async("s", action)) for action in actions_of(task, 6)]

    async def play_all():
        return await asyncio.gather(
            *(play(slot, task) for slot, task in zip(held, tasks, strict=True))
        )

    held = [pool.acquire() for _ in tasks]
    assert asyncio.run(play_all()) == expected
    for slot in held:
        pool.release(slot)


def test_texts_longer_than_a_pipe_holds_arrive_both_ways(pool):
    slot = pool.acquire()
    slot.call("l", "boil", "0")
    text = "x" * 300_000
    assert slot.call("s", text) == asyncio.run(slot.call_async("s", text))
    tree = slot.call("u")
    assert len(tree[0]) > 100_000
    assert asyncio.run(slot.call_async("u")) == tree
    pool.release(slot)


# the second text does not fit into the pipe
@pytest.mark.parametrize("text", ["look around", "x" * 300_000])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_process_that_stands_still_is_ended_with_all_its_games(small, stand_still, text, awaited):
    held = [small.acquire() for _ in range(2)]
    stand_still(held[0].process.jvm.pid)
    small._call_timeout_s = 0.2
    for slot in held:
        with pytest.raises(JvmLost, match="gave no answer within"):
            asyncio.run(slot.call_async("s", text)) if awaited else slot.call("s", text)
        small.release(slot)
    assert not psutil.pid_exists(held[0].process.jvm.pid)
    assert small.restarts == 1


def test_a_killed_process_ends_the_games_that_wait_for_it(small):
    held = [small.acquire() for _ in range(2)]

    async def wait_both():
        # each call takes seconds
        waiting = [asyncio.create_task(slot.call_async("g", "boil", "1")) for slot in held]
        await asyncio.sleep(0.2)
        os.kill(held[0].process.jvm.pid, signal.SIGKILL)
        return await asyncio.gather(*waiting, return_exceptions=True)

    errors = asyncio.run(wait_both())
    assert [type(error) for error in errors] == [JvmLost, JvmLost]
    assert all("ended with code -9" in str(error) for error in errors)


def test_a_call_that_finds_another_under_way_lets_the_loop_go_on(pool):
    slot = pool.acquire()
    slot.call("l", "boil", "1")

    async def overlap():
        other = asyncio.create_task(asyncio.to_thread(slot.call, "g", "boil", "1"))  # takes seconds
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(slot.call_async("s", "look around"))
        await asyncio.sleep(0.1)
        assert not other.done()
        await other
        return (await waiting)[0]

    assert "This room" in asyncio.run(overlap())
    pool.release(slot)


def test_a_call_that_is_cancelled_leaves_its_answer_to_nobody(small):
    slot = small.acquire()

    async def cancel():
        async with asyncio.timeout(0.2):
            await slot.call_async("g", "boil", "1")

    with pytest.raises(TimeoutError):
        asyncio.run(cancel())
    with pytest.raises(JvmLost, match="was cancelled"):
        slot.call("l", "boil", "0")


def test_a_process_that_died_unused_is_seen_without_a_call(small, caplog):
    slot = small.acquire()
    small.release(slot)
    os.kill(slot.process.jvm.pid, signal.SIGKILL)
    wait_until(lambda: small.restarts, 10)
    assert "ended by itself with code -9" in caplog.text
    assert small.acquire().process is not slot.process
    assert small.restarts == 1


def test_a_process_that_runs_out_of_memory_ends(monkeypatch):
    monkeypatch.setattr(slots, "HEAP_MIB", (8, 1))
    pool = SlotPool(slots_per_jvm=2)

    def fill():
        for _ in range(2):
            pool.acquire().call("l", "boil", "0")

    try:
        with pytest.raises(JvmLost, match="ended with code 3"):
            fill()
    finally:
        pool.close()


def test_a_process_that_grew_too_large_is_replaced_when_its_games_are_over(small, monkeypatch):
    first, second = small.acquire(), small.acquire()
    second.call("l", "boil", "0")
    monkeypatch.setattr(slots, "GROWN", 0.1)
    small.release(first)
    assert second.call("s", "look around")[0]  # the other game continues
    pid = second.process.jvm.pid
    small.release(second)
    assert not psutil.pid_exists(pid)
    monkeypatch.undo()
    assert small.acquire().process.jvm.pid != pid


def test_processes_nobody_needs_end_after_a_while_but_the_first(small, monkeypatch):
    held = [small.acquire() for _ in range(5)]
    first, *others = small.pids
    assert len(others) == 2
    for slot in held:
        small.release(slot)
    assert small.acquire().process.jvm.pid == first  # games fill the first process again
    assert small.pids == [first, *others]
    monkeypatch.setattr(slots, "IDLE_S", 0.0)
    small.acquire()
    assert small.pids == [first]
    assert not any(psutil.pid_exists(pid) for pid in others)
    assert small.restarts == 0


def test_closing_leaves_no_process_thread_or_descriptor():
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        pool = SlotPool()
        slot = pool.acquire()
        pids = pool.pids
        # no process listens on a port
        assert not [
            c for c in psutil.Process(pids[0]).net_connections() if c.status == psutil.CONN_LISTEN
        ]
        pool.close()
        with pytest.raises(JvmLost):
            slot.call("s", "look around")
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_its_server(how, tmp_path):
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "envs",
        "serve",
        "sciworld",
        "--port-file",
        str(port_file),
        "--max-sessions",
        "1",
        "--drain-timeout",
        "1",
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(server.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.send_signal(how)
    server.wait(60)
    gone, left = psutil.wait_procs(children, timeout=20)
    assert gone
    assert not left
