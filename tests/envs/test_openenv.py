"""Our servers under OpenEnv's contract: its client, and messages its client never sends."""

import asyncio
import contextlib
import json
import os
import time

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from envs.env import EnvSpec
from tests.completed import completed
from tests.envs.sockets import RESET, Broken, ask, await_none, code_of, served, socket_of, step

TOKEN = "hush-hush"


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
def test_openenvs_own_client_plays_gold_episodes(serving, openenv, gold, name):
    played = [gold(name, task) for task in (36, 7, 130)]
    with serving(name, token=TOKEN) as (url, sessions):
        episodes = [
            (task, [action for action, _ in turns])
            for task, (_, turns) in zip((36, 7, 130), played, strict=True)
        ]
        command, environment = openenv("play")
        done = completed(
            *command,
            input=json.dumps({"url": url, "token": TOKEN, "episodes": episodes}),
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, done.stderr
        *told, again = json.loads(done.stdout)
        assert await_none(sessions)
    for number, ((task, actions), (first, turns), each) in enumerate(
        zip(episodes, played, told, strict=True)
    ):
        expected = [[first, None, False, False]] + [
            [r.observation, r.reward, r.terminated, r.success] for _, r in turns
        ]
        assert each["rows"] == expected
        assert each["state"] == {
            "episode_id": f"episode {number}",
            "step_count": len(actions),
            "task_id": task,
        }
    assert "reset for another one (code: EXECUTION_ERROR)" in again


async def test_what_cannot_be_understood_gets_its_code_and_the_episode_goes_on(serving):
    async with served(serving) as (url, _), socket_of(url) as socket:
        assert await code_of(socket, step("inventory")) == "EXECUTION_ERROR"
        assert (await ask(socket, {"type": "state"}))["data"] == {
            "episode_id": None,
            "step_count": 0,
            "task_id": None,
        }
        first = await ask(socket, RESET)
        assert first["type"] == "observation"
        assert first["data"]["reward"] is None
        for message, code in [
            ("{", "INVALID_JSON"),
            ("", "INVALID_JSON"),
            ("[" * 50_000, "INVALID_JSON"),
            (r'{"type": "step", "data": {"message": "\ud800"}}', "INVALID_JSON"),
            (b"\xff\xfe", "INVALID_JSON"),
            ("[]", "VALIDATION_ERROR"),
            ("null", "VALIDATION_ERROR"),
            ({}, "UNKNOWN_TYPE"),
            ({"type": "expert"}, "UNKNOWN_TYPE"),
            ({"type": "mcp", "data": {}}, "UNKNOWN_TYPE"),
            ({"type": "step"}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"message": 5}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"message": "x" * 16_385}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"message": "x", "turn": 1}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": "1"}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": 2**53}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"episode_id": "x" * 256}}, "VALIDATION_ERROR"),
            ({"type": "reset", "seed": 1}, "VALIDATION_ERROR"),
        ]:
            assert await code_of(socket, message) == code, message
        shown = await ask(
            socket,
            {"type": "step", "data": {"message": "get 9 emerald", "metadata": {"why": "to begin"}}},
        )
        assert (shown["data"]["observation"]["text"], shown["data"]["reward"]) == (
            "Got 9 emerald",
            0.0,
        )
        assert (await ask(socket, {"type": "state"}))["data"]["step_count"] == 1
        # unknown fields are ignored
        again = await ask(socket, {"type": "reset", "data": {"seed": 36, "split": "train"}})
        assert again["data"]["observation"] == first["data"]["observation"]


async def test_errors_say_where_and_do_not_repeat_what_was_sent(serving):
    async with served(serving) as (url, _), socket_of(url) as socket:
        reply = await ask(socket, {"type": "step", "data": {"message": ["secret words"]}})
        assert reply["data"]["message"].startswith(
            "step.data.message: Input should be a valid string"
        )
        assert reply["data"]["errors"][0]["loc"] == ["step", "data", "message"]
        assert "secret" not in json.dumps(reply)


async def test_a_close_and_a_lost_connection_free_the_session_and_a_reset_keeps_to_one(serving):
    async with (
        served(serving) as (url, sessions),
        socket_of(url) as first,
        socket_of(url) as second,
    ):
        for _ in range(3):
            await ask(first, RESET)
        await ask(second, RESET)
        assert sessions.info().active_sessions == 2
        await first.send('{"type": "close"}')
        await asyncio.wait_for(first.wait_closed(), 5)
        assert first.close_code == 1000
        assert sessions.info().active_sessions == 1
        second.transport.abort()
        await asyncio.wait_for(asyncio.to_thread(await_none, sessions), 5)
        assert sessions.info().active_sessions == 0


async def test_a_full_server_says_so_at_once_and_ends_the_connection(serving):
    async with served(serving, max_sessions=2) as (url, sessions):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await ask(await stack.enter_async_context(socket_of(url)), RESET)
            async with socket_of(url) as late:
                told = json.loads(await asyncio.wait_for(late.recv(), 5))["data"]
                assert (told["code"], told["active_sessions"], told["max_sessions"]) == (
                    "CAPACITY_REACHED",
                    2,
                    2,
                )
                with pytest.raises(ConnectionClosed):
                    await asyncio.wait_for(late.recv(), 5)
        await asyncio.to_thread(await_none, sessions)
        async with socket_of(url) as socket:
            await ask(socket, RESET)


async def test_connections_without_a_reset_are_counted_too_and_http_still_has_room(serving):
    async with served(serving, max_sessions=2) as (url, _), contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(socket_of(url)) for _ in range(6)]
        await ask(sockets[0], {"type": "state"})
        assert [
            json.loads(await asyncio.wait_for(each.recv(), 5))["data"]["code"]
            for each in sockets[2:]
        ] == ["CAPACITY_REACHED"] * 4
        assert (await asyncio.to_thread(status, f"{url}/health")) == 200


def status(url, **headers):
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=5
        ) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_server_that_is_ending_takes_no_connection(serving):
    async with served(serving) as (url, sessions):
        sessions.draining = True
        async with socket_of(url) as socket:
            told = json.loads(await asyncio.wait_for(socket.recv(), 5))["data"]
        assert (told["code"], told["message"]) == (
            "CAPACITY_REACHED",
            "the server is shutting down",
        )
        assert await asyncio.to_thread(status, f"{url}/health") == 503


async def test_a_connection_without_a_turn_is_ended_whatever_else_it_sends(serving):
    async with (
        served(serving, session_ttl_s=0.6) as (url, sessions),
        socket_of(url) as quiet,
        socket_of(url) as noisy,
    ):
        await ask(quiet, RESET)
        await ask(noisy, RESET)
        began, number = time.monotonic(), 0
        with contextlib.suppress(ConnectionClosed):
            while time.monotonic() - began < 5:
                number += 1
                await ask(noisy, "{" if number % 2 else {"type": "state"})
                await asyncio.sleep(0.05)
        assert 5 < number < 50
        told = json.loads(await asyncio.wait_for(quiet.recv(), 5))["data"]
        assert (told["code"], told["message"]) == ("SESSION_ERROR", "no turn for 0.6 s")
        assert time.monotonic() - began >= 0.5
        assert await asyncio.to_thread(await_none, sessions)


async def test_environments_that_fail_have_the_codes_of_the_contract(serving, caplog):
    # a report with half a surrogate pair cannot be sent between processes
    caplog.set_level("CRITICAL", "envs")

    async with (
        served(serving, EnvSpec("broken", "", Broken, {}, ("on",))) as (url, _),
        socket_of(url) as socket,
    ):
        assert await code_of(socket, {"type": "reset", "data": {"seed": 2}}) == "EXECUTION_ERROR"
        await ask(socket, {"type": "reset"})
        assert await code_of(socket, step("break")) == "EXECUTION_ERROR"
        assert await code_of(socket, step("on")) == "EXECUTION_ERROR"  # needs a reset first
        await ask(socket, {"type": "reset", "data": {}})
        assert (await ask(socket, step("on")))["data"]["observation"]["text"] == "on"
        reply = await ask(socket, {"type": "reset", "data": {"seed": 1}})
        assert (reply["data"]["code"], reply["data"]["factory_name"]) == ("FACTORY_ERROR", "broken")
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 5)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "null"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}"}, 101),
    ],
)
@pytest.mark.parametrize("route", ["/ws", "/step", "/nothing"])
async def test_a_websocket_passes_the_same_doors(serving, headers, expected, route, caplog):
    caplog.set_level("WARNING")
    async with served(serving, token=TOKEN) as (url, sessions):
        if expected == 101:
            expectation = (
                contextlib.nullcontext()
                if route == "/ws"
                else pytest.raises(InvalidStatus, match="403")
            )
        else:
            expectation = pytest.raises(InvalidStatus, match=str(expected))
        with expectation as caught:
            own = {"host": url.split("//")[1].split(":")[0], "port": int(url.rpartition(":")[2])}
            target = f"ws://{headers.get('Host', '127.0.0.1')}{route}"
            fields = {name: value for name, value in headers.items() if name != "Host"}
            async with connect(target, **own, proxy=None, additional_headers=fields):
                pass
        if caught is not None and expected != 101:
            assert (
                json.loads(caught.value.response.body)["kind"]
                == {401: "unauthorized", 403: "forbidden"}[expected]
            )
        assert sessions.info().active_sessions == 0
    assert TOKEN not in caplog.text
    assert not [
        record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))
    ]


def test_what_else_openenvs_tools_ask_for(serving):
    import urllib.request

    def get(url):
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=5) as reply:
            return json.loads(reply.read())

    with serving("textcraft", token=TOKEN) as (url, _):
        assert status(f"{url}/health") == 200  # a probe has no token
        assert status(f"{url}/schema") == status(f"{url}/metadata") == 401
        schema = get(f"{url}/schema")
        assert schema["action"]["required"] == ["message"]
        assert {"text", "metadata"} == set(schema["observation"]["properties"])
        assert {"episode_id", "step_count"} < set(schema["state"]["properties"])
        about = get(f"{url}/metadata")
        assert about["name"] == "textcraft"
        assert about["description"].startswith("You are given a list of crafting commands")
