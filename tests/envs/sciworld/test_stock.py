"""Without the wrapper jar: the packaged engine, one process per session."""

import asyncio
import gc
import socket
import threading

import psutil
import pytest

from envs.registry import load_spec
from envs.sciworld import stock
from envs.sciworld.gold import solution
from envs.sciworld.jvm import JvmLost
from envs.sciworld.stock import StockPool
from envs.sciworld.tasks import Task

TASK = 2936 + 3


# their object lists and readings depend on identity hashes
SENSITIVE = [
    Task("power-component", 10),
    Task("use-thermometer", 270),
    Task("identify-life-stages-2", 0),
]


@pytest.fixture
def place():
    """Yield a slot with a loaded game; close it after the test."""
    pool = StockPool()
    place = pool.acquire()
    place.call("l", "boil", "0")
    place.call("s", "look around")
    yield place
    pool.close()


@pytest.mark.slow
def test_under_equal_identity_hashes_the_stock_engine_says_what_ours_does(pool):
    ours, theirs = pool.acquire(), stock.start()
    try:
        for task in SENSITIVE:
            told = [
                [place.call("l", task.name, str(task.variation))]
                + [place.call("s", action) for action in solution(task)]
                for place in (ours, theirs)
            ]
            assert told[0] == told[1], task
    finally:
        theirs.end()
        pool.release(ours)


def transcript(world):
    told = [world.reset(TASK)]
    told += [
        world.step(action)
        for action in ("open door to kitchen", "go to kitchen", "look around", "focus on agent")
    ]
    return told


def test_without_the_wrapper_episodes_are_the_same_and_the_log_says_so(
    world, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(stock, "WRAPPER", tmp_path / "slots.jar")
    spec = load_spec("sciworld", {})
    assert "one Java process for each session" in caplog.text
    stocked = spec.make()
    try:
        assert transcript(stocked) == transcript(world())
        assert "kitchen" in str(stocked.render())
        assert "close door to outside" in stocked.hints()
    finally:
        stocked.close()
        spec.close()


@pytest.mark.timeout(120)
def test_its_gateway_asks_for_a_token_and_ends_with_the_session():
    pool = StockPool()
    place = pool.acquire()
    (pid,) = pool.pids
    port = place.gateway.gateway_parameters.port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(b"c\nt\ngetClass\ne\n")
        assert b"Authentication error" in stranger.recv(1000)
    pool.release(place)
    assert not psutil.pid_exists(pid)
    assert pool.pids == []


def test_a_game_that_gives_no_answer_is_lost_in_time(place, stand_still, monkeypatch):
    monkeypatch.setattr("envs.sciworld.stock.CALL_TIMEOUT_S", 0.2)
    stand_still(place.process.pid)

    async def step():
        with pytest.raises(JvmLost, match="gave no answer within"):
            await place.call_async("s", "look around")
        await asyncio.to_thread(place.end)

    asyncio.run(asyncio.wait_for(step(), 20))  # the worker thread has ended, too


def test_a_process_that_does_not_begin_in_time_is_ended(monkeypatch):
    from py4j.protocol import Py4JError  # installed with the engine

    monkeypatch.setattr("envs.sciworld.stock.CALL_TIMEOUT_S", 0.01)
    before = set(psutil.Process().children())
    with pytest.raises(Py4JError):
        stock.start()
    assert not psutil.wait_procs(set(psutil.Process().children()) - before, timeout=10)[1]


def test_a_call_nobody_awaits_has_a_deadline_too(place, stand_still):
    (connection,) = place.gateway._gateway_client.deque
    assert connection.socket.gettimeout() == stock.CALL_TIMEOUT_S
    connection.socket.settimeout(0.5)
    stand_still(place.process.pid)
    with pytest.raises(JvmLost):
        place.call("s", "look around")


def test_a_process_that_dies_before_it_reads_a_call_is_lost_and_no_game_failed(place, stand_still):
    """Raise JvmLost: otherwise a killed process would be an episode with score 0."""
    stand_still(place.process.pid)
    threading.Timer(0.5, place.process.kill).start()  # the process does not read the call
    with pytest.raises(JvmLost):
        place.call("s", "look around")


def test_what_is_left_of_a_game_that_stands_still_is_collected_without_asking_it(stand_still):
    slots = [stock.start()]
    process = slots[0].process
    stand_still(process.pid)

    def forget():
        slots.clear()
        gc.collect()

    collecting = threading.Thread(target=forget)
    collecting.start()
    collecting.join(10)
    waits = collecting.is_alive()
    process.kill()
    process.wait(10)
    assert not waits
