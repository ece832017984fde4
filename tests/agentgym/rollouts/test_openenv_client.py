"""The client of OpenEnv's contract against OpenEnv's own server, ours, and broken ones."""

import asyncio
import json
import logging
import time
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

import pytest
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response

from agentgym.config import EnvConfig, RunConfig
from agentgym.deploy.owned import owned_process
from agentgym.rollouts import openenv_client as client
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import Guide
from agentgym.rollouts.openenv_client import OpenEnvPool
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Item
from tests.waiting import text_of

TASKS = (36, 7, 130)


@contextmanager
def original(openenv, folder, name, most):
    """Serve our simulator with OpenEnv's own server, for this many connections. Return its URL."""
    command, environment = openenv("serve", name, str(folder / "port"), str(most))
    with owned_process(command, log_path=folder / "log", env=environment) as process:
        yield f"http://127.0.0.1:{text_of(folder / 'port', process, folder / 'log')}"


async def follow(pools, name, task, first, turns):
    """Play a known episode and compare the observations."""
    async with pools.session(Item(name, task), f"key {task}") as session:
        assert session.observation == first
        for number, (action, expected) in enumerate(turns, start=1):
            reply = await session.step(action)
            assert (reply.turn, reply.observation, reply.reward) == (
                number,
                expected.observation,
                expected.reward,
            )
            assert (reply.terminated, reply.truncated, reply.success) == (
                expected.terminated,
                False,
                expected.success,
            )
    return reply


def configured(name, url):
    return EnvConfig(name=name, dialect="openenv", endpoints=(url,), request_timeout_s=10)


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
async def test_gold_episodes_on_openenvs_own_server(openenv, gold, tmp_path, name):
    with original(openenv, tmp_path, name, len(TASKS)) as url:
        env = configured(name, url)
        async with EnvPools.of([env], {name: env.endpoints}) as pools:
            assert await pools.check([env], allow_expert=False) == {name: Guide()}
            replies = await asyncio.gather(
                *(follow(pools, name, task, *gold(name, task)) for task in TASKS)
            )
        assert all(reply.success and reply.terminated for reply in replies)


async def test_a_place_that_is_taken_is_waited_for(openenv, gold, tmp_path):
    """Wait for the one slot of an OpenEnv server; each episode frees it when it ends."""

    with original(openenv, tmp_path, "textcraft", 1) as url:
        async with OpenEnvPool([url], request_timeout_s=10, max_retries=0) as pool:
            replies = await asyncio.gather(
                *(follow(pool, "textcraft", task, *gold("textcraft", task)) for task in TASKS)
            )
            assert all(reply.success for reply in replies)
            for task in TASKS:
                await follow(pool, "textcraft", task, *gold("textcraft", task))
        async with (
            OpenEnvPool([url], request_timeout_s=10, max_retries=1, patience_s=0) as pool,
            pool.session(Item("textcraft", 0), "a"),
        ):
            with pytest.raises(EnvError) as caught:
                async with pool.session(Item("textcraft", 1), "b"):
                    pass
            assert caught.value.kind == "full"
            assert "CAPACITY_REACHED" in str(caught.value)


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
async def test_gold_episodes_on_our_servers(serving, gold, name):
    with serving(name) as (url, sessions):
        env = configured(name, url)
        async with EnvPools.of([env], {name: env.endpoints}) as pools:
            await pools.check([env], allow_expert=False)
            await asyncio.gather(*(follow(pools, name, task, *gold(name, task)) for task in TASKS))
            assert sessions.info().active_sessions == 0  # each session ended with its episode


async def test_an_episode_that_our_server_cuts_is_truncated_and_no_success(serving):
    with serving("textcraft", {"max_steps": 2}) as (url, _):
        async with (
            OpenEnvPool([url], request_timeout_s=10) as pool,
            pool.session(Item("textcraft", 36), "key") as session,
        ):
            replies = [await session.step("get 1 emerald") for _ in range(2)]
        assert [(r.terminated, r.truncated, r.success) for r in replies] == [
            (False, False, False),
            (False, True, False),
        ]


TEXTS = {
    "action": {
        "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
        "required": ["message"],
    },
    "observation": {"properties": {"text": {"type": "string"}}, "required": ["text"]},
    "state": {},
}
BEGUN = {
    "type": "observation",
    "data": {"observation": {"text": "begin"}, "reward": None, "done": False},
}


def seen(text="x", reward=0.0, done=False, **metadata):
    return {
        "type": "observation",
        "data": {
            "observation": {"text": text},
            "reward": reward,
            "done": done,
            "metadata": metadata,
        },
    }


def failed(code, **details):
    return {"type": "error", "data": {"message": "why", "code": code, **details}}


@asynccontextmanager
async def standing_in(*replies, schema=TEXTS, status=200, refuse=None):
    """Serve the replies in order; None closes the connection. Return (URL, messages, headers)."""
    left, came, heads = list(replies), [], []

    def over_http(connection, request):
        heads.append(dict(request.headers))
        if request.path == "/schema":
            body = (schema if isinstance(schema, str) else json.dumps(schema)).encode()
            return Response(
                status, HTTPStatus(status).phrase, Headers({"Content-Length": str(len(body))}), body
            )
        return refuse

    async def handle(socket):
        try:
            async for raw in socket:
                came.append(json.loads(raw))
                if came[-1]["type"] == "close":
                    return
                reply = left.pop(0)
                if reply is None:
                    socket.transport.abort()
                elif reply != "silence":
                    await socket.send(
                        reply if isinstance(reply, str | bytes) else json.dumps(reply)
                    )
        except ConnectionClosed:
            pass

    async with serve(handle, "127.0.0.1", 0, process_request=over_http) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came, heads


def pool_of(url, **settings):
    return OpenEnvPool(
        [url], **{"request_timeout_s": 2.0, "max_retries": 1, "patience_s": 0.0, **settings}
    )


def kinds(came):
    return [message["type"] for message in came]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (None, "unreachable"),
        ("silence", "unreachable"),
        (failed("EXECUTION_ERROR"), "env_crashed"),
        (failed("SESSION_ERROR"), "env_crashed"),
        (failed("VALIDATION_ERROR"), "bad_request"),
        (failed("CAPACITY_REACHED"), "full"),
        ({"type": "error", "data": "x"}, "protocol"),
        ({"type": "state", "data": {}}, "protocol"),
        ({"type": "observation", "data": []}, "protocol"),
        ({"type": "observation", "data": {"observation": {}, "done": False}}, "protocol"),
        ({"type": "observation", "data": {"observation": {"text": 5}, "done": False}}, "protocol"),
        ({"type": "observation", "data": {"observation": {"text": "x"}, "reward": 1}}, "protocol"),
        (
            {
                "type": "observation",
                "data": {"observation": {"text": "x"}, "reward": "much", "done": False},
            },
            "protocol",
        ),
        (
            (
                '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": NaN,'
                ' "done": false}}'
            ),
            "protocol",
        ),
        (
            (
                '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": 1e999,'
                ' "done": false}}'
            ),
            "protocol",
        ),
        (seen(done="false"), "protocol"),
        (seen(done=None), "protocol"),
        (seen(reward="0.5"), "protocol"),
        (seen(text=None), "protocol"),
        (seen(text=["x"]), "protocol"),
        ("[" * 100_000, "protocol"),
        ("5", "protocol"),
        (b"\xff", "protocol"),
    ],
)
def test_a_step_that_fails_is_an_environment_error_and_never_sent_twice(reply, kind):
    async def main():
        async with (
            standing_in(BEGUN, reply) as (url, came, _),
            pool_of(url, request_timeout_s=0.5) as pool,
        ):
            with pytest.raises(EnvError) as caught:
                async with pool.session(Item("textcraft", 3), "key") as session:
                    await session.step("go")
            assert caught.value.kind == kind
            assert came[0] == {"type": "reset", "data": {"seed": 3, "episode_id": "key"}}
            assert kinds(came)[:2] == ["reset", "step"]
            assert kinds(came).count("step") == 1

    asyncio.run(asyncio.wait_for(main(), 20))


async def test_half_an_emoji_of_a_server_is_replaced_wherever_it_stands():
    error = {"type": "error", "data": {"message": "why \ud83d", "code": "EXECUTION_ERROR"}}

    async with (
        standing_in(BEGUN, seen("wall \ud83d"), error) as (url, _, _),
        pool_of(url) as pool,
        pool.session(Item("textcraft", 3), "key") as session,
    ):
        assert (await session.step("go")).observation == "wall \ufffd"
        with pytest.raises(EnvError, match=r"why \\ud83d"):
            await session.step("go")


async def test_an_answer_too_large_to_keep_ends_the_episode(monkeypatch):
    monkeypatch.setattr(client, "MAX_MESSAGE_BYTES", 10_000)

    async with standing_in(BEGUN, seen("x" * 20_000)) as (url, _, _), pool_of(url) as pool:
        with pytest.raises(EnvError, match="unreachable"):
            async with pool.session(Item("textcraft", 3), "key") as session:
                await session.step("go")


async def test_beginning_is_tried_again_in_a_connection_of_its_own():
    async with (
        standing_in(None, failed("CAPACITY_REACHED"), BEGUN) as (url, came, _),
        pool_of(url, max_retries=2) as pool,
    ):
        async with pool.session(Item("textcraft", 3), "key") as session:
            assert session.observation == "begin"
        assert [kind for kind in kinds(came) if kind != "close"] == ["reset"] * 3
        assert kinds(came)[-1] == "close"
    for code in ("FACTORY_ERROR", "EXECUTION_ERROR"):
        async with standing_in(failed(code)) as (url, came, _), pool_of(url) as pool:
            with pytest.raises(EnvError, match=f"env_crashed: {code}: why"):
                async with pool.session(Item("textcraft", 3), "key"):
                    pass
            assert kinds(came).count("reset") == 1


async def test_success_is_what_the_server_says_else_a_positive_sum_at_the_end():
    async def last(*replies):
        async with (
            standing_in(BEGUN, *replies) as (url, _, _),
            pool_of(url) as pool,
            pool.session(Item("textcraft", 3), "k") as session,
        ):
            for _ in replies:
                reply = await session.step("go")
            return reply.reward, reply.terminated, reply.truncated, reply.success

    assert await last(seen(reward=1.0, done=True)) == (1.0, True, False, True)
    assert await last(seen(reward=1), seen(reward=None, done=True)) == (0.0, True, False, True)
    assert await last(seen(reward=0.5)) == (0.5, False, False, False)
    assert await last(seen(reward=-1, done=True)) == (-1.0, True, False, False)
    assert await last(seen(reward=0.2, done=True, success=False)) == (0.2, True, False, False)
    assert await last(seen(reward=0.2, done=True, truncated=True)) == (0.2, False, True, False)
    assert await last(seen(reward=0.2, done=True, truncated="no", success="no")) == (
        0.2,
        True,
        False,
        True,
    )
    older = seen(reward=0.2, done=True)
    older["data"]["observation"]["metadata"] = {"success": False}
    assert await last(older) == (0.2, True, False, False)


def schema_of(action, observation, **more):
    return {"action": action, "observation": observation, "state": {}, **more}


def fields(required, *optional):
    return {
        "properties": {name: {"type": "string"} for name in (*required, *optional)},
        "required": list(required),
    }


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXTS, ("message", "text")),
        (schema_of(fields(["code"], "language"), fields([], "stdout")), ("code", "stdout")),
        (schema_of(fields(["role", "message"]), fields(["text", "title"])), ("message", "text")),
        (
            schema_of(
                fields(["a"]),
                {
                    "properties": {
                        "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "n": {"type": "integer"},
                    }
                },
            ),
            ("a", "b"),
        ),
        (schema_of(fields(["a"]), fields(["b"]), reset_observation=None), ("a", "b")),
        (schema_of(fields(["a", "b"]), fields(["c"])), "which of a, b is the text of its actions"),
        (
            schema_of({"properties": {"n": {"type": "integer"}}}, fields(["c"])),
            "no text field of its actions",
        ),
        (schema_of(fields(["a"]), {"properties": {}}), "no text field of its observations"),
    ],
)
async def test_the_text_fields_are_found_or_asked_for(schema, expected):
    async with standing_in(schema=schema) as (url, _, _), pool_of(url) as pool:
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                await pool.check(EnvConfig(name="textcraft"), allow_expert=False)
        else:
            await pool.check(EnvConfig(name="textcraft"), allow_expert=False)
            found = pool._fields[url]
            assert (found.action, found.observation) == expected


@pytest.mark.parametrize(
    ("schema", "status"),
    [("<html>", 200), ("[]", 200), ("{}", 200), ("[" * 100_000, 200), (TEXTS, 404), (TEXTS, 500)],
)
async def test_a_server_without_a_schema_is_refused(schema, status):
    async with standing_in(schema=schema, status=status) as (url, _, _), pool_of(url) as pool:
        with pytest.raises(EnvError, match="no schema of an OpenEnv server") as caught:
            await pool.check(EnvConfig(name="textcraft"), allow_expert=False)
        assert caught.value.kind == "protocol"


async def test_servers_of_a_pool_have_the_same_fields():
    other = schema_of(fields(["code"]), fields(["text"]))
    async with standing_in() as (first, _, _), standing_in(schema=other) as (second, _, _):
        pool = OpenEnvPool([first, second], request_timeout_s=2)
        with pytest.raises(ValueError, match="name servers of one environment"):
            await pool.check(EnvConfig(name="textcraft"), allow_expert=False)


def test_the_token_goes_to_the_named_server_and_into_no_log(monkeypatch, caplog):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "hush-hush")

    async def main():
        async with (
            standing_in(BEGUN) as (url, _, heads),
            pool_of(url) as pool,
            pool.session(Item("textcraft", 3), "key"),
        ):
            # schema and connection
            assert [head["authorization"] for head in heads] == ["Bearer hush-hush"] * 2

    with caplog.at_level(logging.DEBUG):
        logging.getLogger("websockets.server").setLevel(logging.WARNING)  # the stand-in's logger
        asyncio.run(main())
    assert "hush-hush" not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_connection_that_is_sent_elsewhere_is_refused(monkeypatch, status):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "hush-hush")
    async with standing_in(BEGUN) as (elsewhere, _, stolen):
        target = f"{elsewhere.replace('http', 'ws')}/ws"
        moved = Response(status, "Moved", Headers({"Location": target, "Content-Length": "0"}), b"")
        async with standing_in(refuse=moved) as (url, came, _), pool_of(url) as pool:
            with pytest.raises(EnvError, match=f"status {status}") as caught:
                async with pool.session(Item("textcraft", 3), "key"):
                    pass
        assert (caught.value.kind, came, stolen) == ("protocol", [], [])


async def test_a_session_outlives_a_loop_that_is_busy_and_pings_are_answered_meanwhile(
    serving, monkeypatch
):
    from envs import connection

    monkeypatch.setattr(connection, "PING_S", 0.1)
    monkeypatch.setattr(connection, "PONG_S", 0.8)
    with serving("textcraft") as (url, _):
        async with pool_of(url) as pool, pool.session(Item("textcraft", 36), "key") as session:
            await asyncio.sleep(2)  # the model is thinking, nothing reads
            time.sleep(0.5)  # and the event loop is blocked
            assert (await session.step("inventory")).turn == 1


def test_what_the_dialect_cannot_do_is_said_before_anything_starts():
    with pytest.raises(ValueError, match=r"dialect openenv of babyai needs env\.endpoints"):
        RunConfig.model_validate({"env": {"dialect": "openenv"}})
    with pytest.raises(ValueError, match="has none"):
        RunConfig.model_validate(
            {
                "env": {"dialect": "openenv", "endpoints": ["http://a:1"]},
                "rollout": {"instructions": True},
            }
        )
