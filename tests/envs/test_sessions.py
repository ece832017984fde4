"""Sessions of a server: one per key, reaped, bounded, drained, and ready in time."""

import asyncio
import sys
import threading
import time

import pytest

from envs.refusals import Memory
from envs.wire import CreateRequest, ReadyReply
from tests.envs.counter import Counter, create, refusal, serving, step


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_request_key_opens_one_session_even_when_sent_many_times_at_once(blocking):
    async with serving(blocking=blocking) as (client, _, simulator):
        made = simulator.made
        ids = await asyncio.gather(*(create(client, "same") for _ in range(8)))
        assert len(set(ids)) == 1
        assert simulator.made == made + 1
        assert await create(client, "same", task_id=1) == (422, "bad_request")
        assert await create(client, "other") != ids[0]
        await client.post("/close", json={"session_id": ids[0]})
        assert await create(client, "same") == (410, "session_gone")


def test_nothing_is_allocated_for_good_by_parsing_a_request_or_remembering_its_session():
    memory = Memory()

    def come_and_go(first):
        for number in range(first, first + 2000):
            request = CreateRequest.model_validate_json(
                f'{{"request_key": "key {number}", "task_id": {number}}}'
            )
            memory.add(request.request_key)

    come_and_go(0)
    before = sys.getallocatedblocks()
    come_and_go(2000)
    assert sys.getallocatedblocks() - before < 200
    assert "key 3999" in memory
    assert "key 4000" not in memory


async def test_the_memory_of_closed_keys_is_bounded(monkeypatch):
    monkeypatch.setattr("envs.refusals.REMEMBERED", 3)

    async with serving() as (client, _, _):
        for number in range(5):
            await client.post("/close", json={"session_id": await create(client, f"k{number}")})
        replies = [await create(client, f"k{number}") for number in range(2, 5)]
        assert replies == [(410, "session_gone")] * 3
        assert isinstance(await create(client, "k0"), str)


KINDS = [{}, {"blocking": True}, {"blocking": True, "awaited": True}]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_repeated_turn_gets_the_stored_reply_and_never_acts_twice(kind):
    async with serving(**kind) as (client, _, simulator):
        session = await create(client)
        acted = simulator.acted
        replies = await asyncio.gather(
            *(step(client, session, 1, action) for action in ("slow", "slow", "slow"))
        )
        assert len({reply.content for reply in replies}) == 1
        again = await step(client, session, 1, "something else")
        assert again.content == replies[0].content
        assert simulator.acted == acted + 1


async def test_a_gap_in_turns_is_refused_with_the_expected_one():
    async with serving() as (client, _, _):
        session = await create(client)
        await step(client, session, 1)
        await step(client, session, 2)
        for turn in (1, 4):
            reply = await step(client, session, turn)
            assert refusal(reply) == (409, "turn_mismatch")
            assert reply.json()["expected_turn"] == 3


@pytest.mark.parametrize("last", ["go", "cut"])
async def test_no_reward_can_be_had_after_the_end(last):
    async with serving() as (client, _, simulator):
        session = await create(client)
        turn = 1
        while True:
            reply = await step(client, session, turn, last)
            if reply.json()["terminated"] or reply.json()["truncated"]:
                break
            turn += 1
        acted = simulator.acted
        assert (await step(client, session, turn)).content == reply.content
        assert refusal(await step(client, session, turn + 1)) == (410, "session_gone")
        assert simulator.acted == acted


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crash_closes_its_session_and_leaves_the_others_alone(kind):
    async with serving(**kind) as (client, _, _):
        first, second = await create(client, "a"), await create(client, "b")
        for action in ("crash", "odd", "not a number"):
            reply = await step(client, first, 1, action)
            assert refusal(reply) == (500, "env_crashed")
            assert refusal(await step(client, first, 1)) == (410, "session_gone")
            first = await create(client, action)
        assert "disk on fire" not in reply.json()["message"]
        assert (await step(client, second, 1)).status_code == 200
        assert await create(client, "c", task_id=13) == (500, "env_crashed")
        # a failed create does not use up its key
        assert await create(client, "c", task_id=12) not in (first, second)


async def test_idle_sessions_are_reaped_and_used_ones_are_not():
    async with serving(session_ttl_s=0.25) as (client, _, _):
        idle, used = await create(client, "idle"), await create(client, "used")
        for _ in range(10):
            await asyncio.sleep(0.06)
            assert (
                await client.get("/observation", params={"session_id": used})
            ).status_code == 200
        assert refusal(await step(client, idle, 1)) == (410, "session_gone")
        assert "env_sessions_reaped_total 1.0" in (await client.get("/metrics")).text


async def test_a_full_server_says_when_to_come_back():
    async with serving(max_sessions=1) as (client, _, _):
        first = await create(client, "a")
        reply = await client.post("/create", json={"request_key": "b", "task_id": 0})
        assert refusal(reply) == (503, "full")
        assert int(reply.headers["Retry-After"]) == reply.json()["retry_after_s"] == 1
        assert await create(client, "a") == first
        await client.post("/close", json={"session_id": first})
        assert isinstance(await create(client, "b"), str)


async def test_a_draining_server_refuses_new_sessions_and_lets_open_ones_finish():
    async with serving(drain_timeout_s=30.0) as (client, sessions, _):
        session = await create(client)
        draining = asyncio.create_task(sessions.drain())
        await asyncio.sleep(0.05)
        assert await create(client, "late") == (503, "draining")
        assert refusal(await client.get("/readyz")) == (503, "draining")
        assert (await step(client, session, 1)).status_code == 200
        assert not draining.done()
        await client.post("/close", json={"session_id": session})
        await asyncio.wait_for(draining, 1)


async def test_draining_ends_at_its_deadline_and_closes_what_is_left():
    started = time.monotonic()
    async with serving(drain_timeout_s=0.3) as (client, _, simulator):
        await create(client)
    elapsed, simulator = time.monotonic() - started, simulator
    assert 0.3 <= elapsed < 2
    assert simulator.closed == simulator.made


async def test_many_simulators_that_are_slow_to_close_hold_up_the_end_of_a_server_but_shortly():
    class Slow(Counter):
        made = closed = acted = 0

        def close(self):
            time.sleep(0.1)
            super().close()

    async with serving(blocking=True, make=Slow, drain_timeout_s=0.05) as (client, *_):
        for number in range(64):
            await create(client, f"k{number}")
        ending = time.monotonic()
    assert time.monotonic() - ending < 3  # sequentially it would take 6.4 s
    assert Slow.closed == Slow.made


async def test_a_server_is_ready_once_the_scripted_episode_has_passed():
    async with serving() as (client, sessions, _):
        assert ReadyReply.model_validate_json((await client.get("/readyz")).content).ready
        sessions.ready = False
        assert refusal(await client.get("/readyz")) == (503, "not_ready")
        assert (await client.get("/healthz")).text == "ok"


async def test_a_scripted_episode_that_fails_is_reported_and_never_ready():
    async with serving(probe=("crash",)) as (client, _, _):
        reply = await client.get("/readyz")
        assert refusal(reply) == (503, "env_crashed")
        assert "disk on fire" in reply.json()["message"]


async def test_a_server_is_ready_once_it_is_warm():
    warmed = []
    cooking = threading.Event()

    def warm(most):
        cooking.wait(10)
        warmed.append(most)

    # the server needs a second to become ready
    async with serving(warm=warm, max_sessions=7) as (client, sessions, _):
        assert refusal(await client.get("/readyz")) == (503, "not_ready")
        cooking.set()
        async with asyncio.timeout(10):
            while not sessions.ready:
                await asyncio.sleep(0.01)
    assert warmed == [7]


async def test_a_server_that_cannot_be_warmed_is_never_ready():
    def warm(most):
        raise MemoryError(f"no memory left for {most}")

    async with serving(warm=warm) as (client, _, simulator):
        reply = await client.get("/readyz")
        assert refusal(reply) == (503, "env_crashed")
        assert "no memory left" in reply.json()["message"]
        assert simulator.made == 0
