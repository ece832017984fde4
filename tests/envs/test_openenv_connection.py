"""WebSockets that break the protocol, send without end or have disappeared."""

import asyncio
import contextlib
import json
import time

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Opcode

from envs import connection, openenv
from envs.env import EnvSpec, StepResult
from tests.envs.sockets import (
    RESET,
    Broken,
    ask,
    await_none,
    code_of,
    frame,
    raw_handshake,
    served,
    socket_of,
    step,
)


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


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (raw_handshake(), b"HTTP/1.1 101"),
        (raw_handshake("/ws?x=%ff"), b"HTTP/1.1 101"),
        (raw_handshake(X="\xff"), b"HTTP/1.1 101"),
        (raw_handshake(X="y" * 9_000), b""),  # valid in HTTP, but too long for a handshake
        (raw_handshake("/ws?" + "y" * 9_000), b""),
        (raw_handshake(X="y" * 20_000), b"HTTP/1.1 431"),
        (raw_handshake(Sec_WebSocket_Key=None), b"HTTP/1.1 400"),
        (raw_handshake(Sec_WebSocket_Key="short"), b"HTTP/1.1 400"),
        (raw_handshake(Sec_WebSocket_Version="8"), b"HTTP/1.1 4"),
        (raw_handshake(method="POST"), b""),
        (raw_handshake(method="POST", body="hello", Content_Length="5"), b""),
        (raw_handshake(body="hello", Content_Length="5"), b""),
        # sent before the response to an earlier request
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


def memory_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


async def flood(url, *pieces, most=64 << 20):
    """Send forever without reading. Return the number of bytes that the server accepted."""
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
        # as if the client's machine had died: no response, no close
        gone.transport.pause_reading()
        until = time.monotonic() + 5
        while sessions.info().active_sessions > 1:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.6)
        assert (await ask(there, step("inventory")))["type"] == "observation"
        gone.transport.abort()


def num_connections(url):
    """Return the number of connections of the server in this process."""
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
