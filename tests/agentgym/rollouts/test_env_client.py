"""Requests to an environment server: sent at most once, batched, with errors that name it."""

import asyncio
import socket
import time

import pytest

from agentgym.config import EnvConfig
from agentgym.rollouts import env_client
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.foreign import ForeignPool, unexpected, unreachable
from agentgym.types import Endpoint, Item
from tests.agentgym.rollouts.sessions import ACTIONS, cutting_proxy, play, pool_of

BABYAI = EnvConfig(name="babyai")


async def test_a_reply_lost_on_the_way_does_not_act_twice(serving):
    with serving() as (endpoint, sessions):
        async with pool_of(endpoint) as direct:
            expected = await play(direct, "direct")
        cuts = {"/create": 1, "/step": 2}
        steps_before = sessions.metrics.steps._value.get()
        async with cutting_proxy(endpoint, cuts) as proxy, pool_of(proxy) as pool:
            assert await play(pool, "through the proxy") == expected
        assert cuts == {"/create": 0, "/step": 0}
        assert sessions.metrics.steps._value.get() - steps_before == len(ACTIONS)
        assert sessions.metrics.created._value.get() == 2
        assert not sessions._by_id


async def play_many(pool, count, name):
    """Play this many episodes concurrently, each on another task."""
    return await asyncio.gather(
        *(play(pool, f"{name}-{task}", task_id=task) for task in range(count))
    )


async def test_requests_of_one_moment_go_together_and_are_answered_as_alone(serving):
    with serving(offer_expert=True) as (endpoint, sessions):
        async with pool_of(endpoint) as pool:
            alone = await play_many(pool, 40, "alone")  # not checked: no expected value
        asked, answered, under_way = [], [], []
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)
            usual = pool.client._post

            async def counted(endpoint, route, *rest):
                asked.append(route)
                under_way.append(len(asked) - len(answered))
                reply = await usual(endpoint, route, *rest)
                answered.append(route)
                return reply

            pool.client._post = counted
            assert await play_many(pool, 40, "together") == alone
        assert set(asked) == {"/batch"}
        assert len(asked) < 40  # 280 requests in fewer than 40 batches
        assert max(under_way) == 2  # the server works on one while the other is read
        assert not sessions._by_id


@pytest.mark.parametrize("passes", [0, 1, 2, 3, 9], ids="after {} passes of the loop".format)
async def test_where_the_pool_closes_nobody_waits_for_an_answer(passes):
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with pool_of(endpoint, request_timeout_s=60.0) as pool:
        told = [asyncio.create_task(pool.client._bundle(endpoint, b"{}")) for _ in range(2)]
        for _ in range(passes):
            await asyncio.sleep(0)
        told += [asyncio.create_task(pool.client._bundle(endpoint, b"{}")) for _ in range(9)]
        for _ in range(passes):
            await asyncio.sleep(0)
    ended = await asyncio.wait_for(asyncio.gather(*told, return_exceptions=True), 2)
    assert {type(each) for each in ended} == {asyncio.CancelledError}


async def test_an_answer_to_many_that_is_lost_acts_once_for_each(serving):
    with serving(offer_expert=True) as (endpoint, sessions):
        async with pool_of(endpoint) as direct:
            expected = await play_many(direct, 8, "direct")
        steps_before = sessions.metrics.steps._value.get()
        cuts = {"/batch": 3}
        async with cutting_proxy(endpoint, cuts) as proxy, pool_of(proxy) as pool:
            await pool.check(BABYAI, allow_expert=True)
            assert await play_many(pool, 8, "through the proxy") == expected
        assert cuts == {"/batch": 0}
        assert sessions.metrics.steps._value.get() - steps_before == sum(
            len(told) - 1 for told in expected
        )


async def test_one_refused_among_many_fails_alone(serving):
    with serving(offer_expert=True) as (endpoint, _):
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)

            async def lost():
                async with pool.session(Item("babyai", 0), "lost") as session:
                    session._id = "never opened"
                    with pytest.raises(EnvError, match="unknown_session"):
                        await session.step("turn left")

            told = await asyncio.gather(lost(), *(play(pool, f"{n}", task_id=n) for n in range(4)))
            assert all(len(each) > 1 for each in told[1:])


async def test_a_batch_is_no_longer_than_a_server_reads(serving):
    with serving(offer_expert=True) as (endpoint, _):
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)
            longest = "\x01" * 20_000  # six bytes of JSON each
            told = await asyncio.gather(*(play(pool, f"{n}", [longest]) for n in range(40)))
            assert all("invalid action" in each[1] for each in told)


async def test_a_server_out_of_reach_is_an_error_that_names_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with pool_of(endpoint, max_retries=2) as pool:
            with pytest.raises(
                EnvError, match=rf"{endpoint}/create: unreachable: .*\(tried 3 times\)"
            ):
                await play(pool, "k")


async def test_a_server_that_does_not_answer_in_time_is_an_error():
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
    async with pool_of(
        f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}",
        request_timeout_s=0.2,
        max_retries=1,
    ) as pool:
        started = time.monotonic()
        with pytest.raises(EnvError, match=r"unreachable: .*Timeout"):
            await pool.info()
        assert time.monotonic() - started < 2


async def test_a_lost_session_is_an_error_at_once(serving, monkeypatch):
    monkeypatch.setattr(env_client, "backoff_s", lambda _: pytest.fail("is asked for again"))

    with serving() as (endpoint, _):
        async with pool_of(endpoint) as pool, pool.session(Item("babyai", 0), "k") as session:
            await session.close()
            with pytest.raises(EnvError, match=r"/step session .*: session_gone") as raised:
                await session.step("turn left")
            assert raised.value.kind == "session_gone"
            assert session._id not in str(raised.value)


async def test_the_token_of_the_environment_is_sent(serving, monkeypatch):
    with serving(token="secret") as (endpoint, _):
        async with pool_of(endpoint) as pool:
            with pytest.raises(
                EnvError,
                match="unauthorized: this server asks for a bearer token; set AGENTGYM_ENV_TOKEN",
            ):
                await pool.info()
        monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "secret")
        async with pool_of(endpoint) as pool:
            assert len(await play(pool, "key")) == 6


def test_the_less_used_of_two_servers_is_asked():
    pool = ForeignPool(["http://a/", "http://b"], max_retries=2)
    assert pool.endpoints == ("http://a", "http://b")
    with pool._counted("http://a"), pool._counted("http://a"), pool._counted("http://b"):
        assert {pool._less_used() for _ in range(20)} == {"http://b"}
    assert set(pool._open.values()) == {0}
    assert {pool._less_used() for _ in range(100)} <= set(pool.endpoints)


def test_a_session_that_fails_is_counted_off():
    pool = ForeignPool(["http://a"], max_retries=0)
    try:
        with pool._counted("http://a"):
            raise RuntimeError
    except RuntimeError:
        assert pool._open == {"http://a": 0}


def test_each_server_gets_its_own_token_and_nothing_is_held_open():
    pool = ForeignPool([Endpoint("http://a/", "one"), Endpoint("http://b", "two")], max_retries=0)
    assert "one" in str(pool._headers["http://a"])
    assert "two" not in str(pool._headers["http://a"])

    async def enter():
        async with pool as entered:
            return entered is pool

    assert asyncio.run(enter())


def test_errors_name_the_server_and_show_a_little_of_its_answer():
    error = unreachable("http://a", "/step", OSError("no route"))
    assert (error.kind, "OSError no route" in str(error)) == ("unreachable", True)
    told = unexpected("http://a", "/step", {"x": "y" * 1000})
    assert told.kind == "protocol"
    assert len(str(told)) < 400
