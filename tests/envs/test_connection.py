"""Connections that never end, send too much or send very slowly."""

import contextlib
import json
import re
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from envs import connection
from tests.envs.raw import answer, exchange, refusal, request


def memory_kib(address):
    pid = json.loads(exchange(address, request("/info"))[1])["pid"]
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


ENDLESS = {
    "a header": (b"GET /info HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"a" * 65536),
    "headers": (b"GET /info HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X: y\r\n" * 8192),
    "a URL": (b"GET /", b"a" * 65536),
    "blank lines": (b"\r\n", b"\r\n" * 32768),
    "trailers": (
        (
            b"POST /create HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type:"
            b" application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        ),
        b"X: y\r\n" * 8192,
    ),
    "an extension of a chunk": (
        (
            b"POST /create HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type:"
            b" application/json\r\nTransfer-Encoding: chunked\r\n\r\n5;"
        ),
        b"a" * 65536,
    ),
    "a body": (
        (
            b"POST /create HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type:"
            b" application/json\r\nContent-Length: 999999999\r\n\r\n"
        ),
        b" " * 65536,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut_off_and_not_kept(server, what):
    address, _ = server
    beginning, more = ENDLESS[what]
    before = memory_kib(address)
    sent, num_connections, most = 0, 8, 8 << 20
    for _ in range(num_connections):
        part = 0
        with (
            socket.create_connection(address, timeout=10) as connected,
            contextlib.suppress(ConnectionError),
        ):
            # our send buffer grows to four megabytes if the server is slow
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            connected.sendall(beginning)
            while part < most:
                connected.sendall(more)
                part += len(more)
        sent += part
        assert part < most, "it is read for ever"
    assert memory_kib(address) - before < 8192
    assert sent < num_connections * (4 << 20)  # no more than the buffers of two sockets


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("/info", **{f"X_{number}": "y" for number in range(100)}), 431),
        (request("/info", X="y" * 20_000), 431),
        (request("/" + "a" * 20_000), 431),
        (b"nonsense\r\n\r\n", 400),
        (request("/info", X="y" * 10_000, **{f"Y_{number}": "y" for number in range(50)}), 200),
    ],
)
def test_a_large_head_gets_a_typed_error_and_no_line_in_the_log(server, data, status):
    address, log = server
    before = log.read_text()
    answered = exchange(address, data)
    assert answered[0] == status
    if status != 200:
        assert refusal(answered) == (status, "bad_request")
    assert log.read_text() == before


@contextmanager
def limited(serving, monkeypatch, **limits):
    """Yield (address, sessions) of a server of 4 sessions in a thread, with these limits for its
    connections.
    """
    for name, value in limits.items():
        monkeypatch.setattr(connection, name, value)
    with serving("babyai", max_sessions=4) as (endpoint, sessions):
        yield ("127.0.0.1", int(endpoint.rpartition(":")[2])), sessions


def ended(connected):
    """Return True if the server has closed the connection."""
    try:
        return connected.recv(65536) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("at_once", "slowly", "status"),
    [
        (b"", request("/info"), 408),
        # the response has started: the server can only close the connection
        (request("/create", b" " * 60)[:-60], b" " * 60, 0),
        (b"", b"\r\n" * 30, 408),
        (b"", b"", 0),  # there is no request
    ],
    ids=["head", "body", "blank lines", "nothing"],
)
def test_a_request_that_comes_drop_by_drop_is_given_up(
    serving, monkeypatch, at_once, slowly, status
):
    with (
        limited(serving, monkeypatch, ARRIVAL_S=0.4) as (address, _),
        socket.create_connection(address, timeout=5) as connected,
    ):
        began = time.monotonic()
        connected.sendall(at_once)
        with contextlib.suppress(ConnectionError):
            for byte in slowly[:-1]:
                connected.sendall(bytes([byte]))
                time.sleep(0.02)
        if status:
            assert refusal(answer(connected)) == (status, "bad_request")
        assert ended(connected)
        assert time.monotonic() - began < 0.02 * len(slowly) + 3


def test_an_idle_connection_is_kept_for_its_time_and_no_longer(serving, monkeypatch):
    limits = {"ARRIVAL_S": 0.3, "KEEP_ALIVE_S": 1}
    with (
        limited(serving, monkeypatch, **limits) as (address, _),
        socket.create_connection(address, timeout=5) as connected,
    ):
        for _ in range(3):
            connected.sendall(request("/info"))
            assert answer(connected)[0] == 200
            time.sleep(0.5)  # longer than the timeout of a request
        time.sleep(0.8)
        assert ended(connected)


def test_connections_above_the_limit_are_closed_and_those_in_use_go_on(serving, monkeypatch):
    with (
        limited(serving, monkeypatch, SPARE_CONNECTIONS=2) as (address, _),
        contextlib.ExitStack() as stack,
    ):

        def connect():
            return stack.enter_context(socket.create_connection(address, timeout=5))

        first = connect()
        others = [connect() for _ in range(9)]  # two for each of 4 sessions, and 2 spare
        late = [connect() for _ in range(5)]
        assert all(ended(connected) for connected in late)
        first.sendall(request("/info"))
        assert answer(first)[0] == 200
        others.pop().close()
        deadline = time.monotonic() + 5
        while exchange(address, request("/info"))[0] != 200:
            assert time.monotonic() < deadline


def test_thousands_of_requests_in_one_piece_are_not_kept_for_later(server):
    address, _ = server
    before = memory_kib(address)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connected = stack.enter_context(socket.create_connection(address, timeout=5))
            with contextlib.suppress(ConnectionError):
                connected.sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 6000)
        assert memory_kib(address) - before < 8192
        for number in range(2, 5):  # at least these three connections are accepted
            connected = stack.enter_context(socket.create_connection(address, timeout=5))
            connected.sendall(request("/info") * number)
            got = b""
            while got.count(b'"pid"') < number:
                piece = connected.recv(65536)
                assert piece
                got += piece
