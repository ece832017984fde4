"""Our servers under OpenEnv's contract: its own client, and what no client of its sends."""

import asyncio
import contextlib
import json
import os
import subprocess
import time

import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from envs import connection, openenv
from envs.env import EnvSpec, StepResult, UnknownTask

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
        done = subprocess.run(
            command,
            input=json.dumps({"url": url, "token": TOKEN, "episodes": episodes}),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
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


def await_none(sessions, within_s=5.0):
    """Whether all sessions are closed by then."""
    until = time.monotonic() + within_s
    while sessions.info().active_sessions and time.monotonic() < until:
        time.sleep(0.01)
    return sessions.info().active_sessions == 0


def socket_of(url, **settings):
    return connect(url.replace("http", "ws") + "/ws", proxy=None, compression=None, **settings)


async def ask(socket, message):
    await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(await asyncio.wait_for(socket.recv(), 10))


async def code_of(socket, message):
    reply = await ask(socket, message)
    assert reply["type"] == "error"
    return reply["data"]["code"]


RESET = {"type": "reset", "data": {"seed": 36}}


def step(text):
    return {"type": "step", "data": {"message": text}}


@contextlib.asynccontextmanager
async def served(serving, env="textcraft", options=None, **settings):
    """(url, sessions) of a server on which no session is left in the end."""
    with serving(env, options, **settings) as (url, sessions):
        async with asyncio.timeout(60):
            yield url, sessions
        assert await asyncio.to_thread(await_none, sessions)


async def test_what_cannot_be_understood_gets_its_code_and_the_episode_goes_on(serving):
    async with (
        served(serving) as (url, _),
        socket_of(url) as socket,
    ):
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
            {
                "type": "step",
                "data": {"message": "get 9 emerald", "metadata": {"why": "to begin"}},
            },
        )
        assert (shown["data"]["observation"]["text"], shown["data"]["reward"]) == (
            "Got 9 emerald",
            0.0,
        )
        assert (await ask(socket, {"type": "state"}))["data"]["step_count"] == 1
        # what it does not know is left out
        again = await ask(socket, {"type": "reset", "data": {"seed": 36, "split": "train"}})
        assert again["data"]["observation"] == first["data"]["observation"]


async def test_errors_say_where_and_do_not_repeat_what_was_sent(serving):
    async with (
        served(serving) as (url, _),
        socket_of(url) as socket,
    ):
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


async def test_clients_that_go_at_any_moment_leave_neither_session_nor_line(serving, caplog):
    class Slow(Broken):
        def step(self, action):
            time.sleep(0.05)
            return StepResult("on", 0.0, False)

    caplog.set_level("WARNING")
    async with served(serving, EnvSpec("broken", "", Slow, {}, ("on",), blocking=True)) as (
        url,
        sessions,
    ):
        port = int(url.rpartition(":")[2])
        for after_s in (0.0, 0.001, 0.01, 0.03, 0.2):
            for last in (
                b"",
                frame(Opcode.TEXT, b'{"type": "reset"}'),
                frame(Opcode.TEXT, b'{"type": "reset"}') + frame(Opcode.CLOSE),
            ):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(raw_handshake())
                await asyncio.sleep(0.01 if last else after_s)
                writer.write(
                    last
                    + (
                        frame(Opcode.TEXT, b'{"type": "step", "data": {"message": "on"}}')
                        if last
                        else b""
                    )
                )
                await asyncio.sleep(after_s)
                writer.transport.abort()
        assert await asyncio.to_thread(await_none, sessions)
    assert caplog.messages == []


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
    async with (
        served(serving, max_sessions=2) as (url, _),
        contextlib.AsyncExitStack() as stack,
    ):
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


class Broken:
    """Fails to begin task 1, knows no task 2, and breaks at `break`."""

    def reset(self, task_id):
        if task_id == 2:
            raise UnknownTask("there is no task 2")
        if task_id == 1:
            raise RuntimeError("no world")
        return "begin"

    def step(self, action):
        if action == "break":
            raise RuntimeError("broken \ud800")  # text that no wire carries
        return StepResult("on", 0.0, False)

    def close(self): ...


async def test_environments_that_fail_have_the_codes_of_the_contract(serving, caplog):
    # a report with half a surrogate pair cannot leave its process
    caplog.set_level("CRITICAL", "envs")

    async with (
        served(serving, EnvSpec("broken", "", Broken, {}, ("on",))) as (url, _),
        socket_of(url) as socket,
    ):
        assert await code_of(socket, {"type": "reset", "data": {"seed": 2}}) == "EXECUTION_ERROR"
        await ask(socket, {"type": "reset"})
        assert await code_of(socket, step("break")) == "EXECUTION_ERROR"
        assert await code_of(socket, step("on")) == "EXECUTION_ERROR"  # reset first
        await ask(socket, {"type": "reset", "data": {}})
        assert (await ask(socket, step("on")))["data"]["observation"]["text"] == "on"
        reply = await ask(socket, {"type": "reset", "data": {"seed": 1}})
        assert (reply["data"]["code"], reply["data"]["factory_name"]) == (
            "FACTORY_ERROR",
            "broken",
        )
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


HANDSHAKE = {
    "Host": "127.0.0.1",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def raw_handshake(path="/ws", method="GET", body="", **changes):
    fields = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in changes.items()}}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items() if value is not None),
    ]
    return "\r\n".join([*lines, "", body]).encode("latin-1")


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (raw_handshake(), b"HTTP/1.1 101"),
        (raw_handshake("/ws?x=%ff"), b"HTTP/1.1 101"),
        (raw_handshake(X="\xff"), b"HTTP/1.1 101"),
        (raw_handshake(X="y" * 9_000), b""),  # HTTP allows it, a handshake does not
        (raw_handshake("/ws?" + "y" * 9_000), b""),
        (raw_handshake(X="y" * 20_000), b"HTTP/1.1 431"),
        (raw_handshake(Sec_WebSocket_Key=None), b"HTTP/1.1 400"),
        (raw_handshake(Sec_WebSocket_Key="short"), b"HTTP/1.1 400"),
        (raw_handshake(Sec_WebSocket_Version="8"), b"HTTP/1.1 4"),
        (raw_handshake(method="POST"), b""),
        (raw_handshake(method="POST", body="hello", Content_Length="5"), b""),
        (raw_handshake(body="hello", Content_Length="5"), b""),
        # before the answer to an earlier request
        (b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n" + raw_handshake(), b""),
    ],
    ids=range(13),
)
async def test_a_handshake_is_answered_or_its_connection_closed_and_nothing_is_logged(
    serving, data, first, caplog
):
    caplog.set_level("WARNING")
    async with served(serving) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(data)
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(3):
                while piece := await reader.read(65536):
                    got += piece
                    if got.startswith(b"HTTP/1.1 101"):
                        break
        assert got.startswith(first), got
        assert got.startswith(b"HTTP/1.1 101") or reader.at_eof()
        writer.close()
    assert caplog.messages == []


def test_what_else_openenvs_tools_ask_for(serving):
    import urllib.request

    def get(url):
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=5) as reply:
            return json.loads(reply.read())

    with serving("textcraft", token=TOKEN) as (url, _):
        assert status(f"{url}/health") == 200  # a probe bears no token
        assert status(f"{url}/schema") == status(f"{url}/metadata") == 401
        schema = get(f"{url}/schema")
        assert schema["action"]["required"] == ["message"]
        assert {"text", "metadata"} == set(schema["observation"]["properties"])
        assert {"episode_id", "step_count"} < set(schema["state"]["properties"])
        about = get(f"{url}/metadata")
        assert about["name"] == "textcraft"
        assert about["description"].startswith("You are given a list of crafting commands")


def memory_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


async def flood(url, *pieces, most=64 << 20):
    """Bytes taken of a client that sends for ever and reads nothing."""
    async with socket_of(url, max_queue=1) as socket:
        transport, sent = socket.transport, 0
        transport.pause_reading()
        for first, piece in (pieces,):
            transport.write(first)
            while sent < most and not transport.is_closing():
                transport.write(piece)
                sent += len(piece)
                while transport.get_write_buffer_size() > 1 << 20 and not transport.is_closing():
                    await asyncio.sleep(0.001)
        transport.abort()
    return sent


def frame(opcode, data=b"", *, fin=True):
    return Frame(opcode, data, fin=fin).serialize(mask=True)


async def test_a_message_that_is_no_utf_8_ends_its_connection_and_logs_no_traceback(
    serving, caplog
):
    caplog.set_level("WARNING")
    async with served(serving) as (url, sessions):
        for broken in (
            frame(Opcode.TEXT, b"\xff\xfe"),
            frame(Opcode.TEXT, b'{"type"', fin=False) + frame(Opcode.CONT, b"\xc3"),
        ):
            async with socket_of(url) as socket:
                await socket.send('{"type": "reset"}')
                await socket.recv()
                socket.transport.write(broken)
                with pytest.raises(ConnectionClosed):
                    await asyncio.wait_for(socket.recv(), 5)
                assert socket.close_code == 1007
        assert await asyncio.to_thread(await_none, sessions)
    assert caplog.messages == []


ENDLESS = {
    "pings": (b"", frame(Opcode.PING, b"x" * 125) * 500),
    "empty fragments": (frame(Opcode.TEXT, fin=False), frame(Opcode.CONT, fin=False) * 5000),
    "small fragments": (frame(Opcode.TEXT, fin=False), frame(Opcode.CONT, b"x", fin=False) * 5000),
    "messages": (b"", frame(Opcode.TEXT, b'{"type": "state"}') * 3000),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_cut_off_and_not_kept(serving, what, caplog):
    caplog.set_level("WARNING")
    async with served(serving) as (url, _):
        before = memory_kib()
        sent = [await asyncio.wait_for(flood(url, *ENDLESS[what]), 30) for _ in range(4)]
        assert max(sent) < 32 << 20, "it is read for ever"
        assert memory_kib() - before < 24 * 1024
    assert caplog.messages == []


async def test_a_message_has_the_limit_of_a_body_and_its_fragments_too(serving):
    async with served(serving) as (url, _):
        for parts in (["x" * 262_145], ["x" * 200_000, "x" * 62_145]):
            async with socket_of(url) as socket:
                with contextlib.suppress(ConnectionClosed):
                    await socket.send(parts)
                with pytest.raises(ConnectionClosed) as caught:
                    await asyncio.wait_for(socket.recv(), 5)
                assert caught.value.rcvd.code == 1009
        async with socket_of(url) as socket:
            assert await code_of(socket, "x" * 262_144) == "INVALID_JSON"


async def test_a_client_that_is_no_longer_there_loses_its_place(serving, monkeypatch):
    monkeypatch.setattr(connection, "PING_S", 0.2)
    monkeypatch.setattr(connection, "PONG_S", 0.3)

    async with (
        served(serving) as (url, sessions),
        socket_of(url, ping_interval=None) as gone,
        socket_of(url, ping_interval=None) as there,
    ):
        await ask(gone, RESET)
        await ask(there, RESET)
        # as if its machine had died: nothing is answered, nothing closed
        gone.transport.pause_reading()
        until = time.monotonic() + 5
        while sessions.info().active_sessions > 1:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.6)
        assert (await ask(there, step("inventory")))["type"] == "observation"
        gone.transport.abort()


def num_connections(url):
    """Those of the server in this process."""
    port = int(url.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(
        each.laddr.port == port and each.status not in ("LISTEN", "TIME_WAIT") for each in found
    )


async def test_a_client_that_reads_no_reply_is_given_up(serving, monkeypatch):
    monkeypatch.setattr(openenv, "SEND_S", 0.3)
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.5)

    class Long(Broken):
        def step(self, action):
            return StepResult("x" * (8 << 20), 0.0, False)

    async with (
        served(serving, EnvSpec("broken", "", Long, {}, ())) as (url, sessions),
        socket_of(url, ping_interval=None, max_size=None) as socket,
    ):
        await ask(socket, {"type": "reset"})
        socket.transport.pause_reading()
        for _ in range(3):
            await socket.send(json.dumps(step("on")))
        assert await asyncio.to_thread(await_none, sessions)
        until = time.monotonic() + 5
        while num_connections(url):
            assert time.monotonic() < until, "the connection is kept for one who does not read"
            await asyncio.sleep(0.05)
        socket.transport.abort()
