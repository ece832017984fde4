"""What the clients of servers that are not ours share."""

import asyncio

from agentgym.rollouts.foreign import ForeignPool, unexpected, unreachable
from agentgym.types import Endpoint


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
