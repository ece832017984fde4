"""The gate in front of an app that accepts all requests. tests/flows/test_deployments.py tests it
with the real servers.
"""

import asyncio
import contextlib
import socket
import time
from base64 import b64encode
from threading import Thread

import pytest
import uvicorn

from envs import connection
from services.proxy import Gate, listener, listening

LOGIN = "agentgym:word"
KNOWN = ("authorization", f"Basic {b64encode(LOGIN.encode()).decode()}")
HOST = ("host", "127.0.0.1:4200")
OWN = ("origin", "http://127.0.0.1:4200")


async def answers_everybody(scope, receive, send):
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"X-Frame-Options", b"ALLOWALL")],
        }
    )
    await send({"type": "http.response.body", "body": b"secret"})


def ask(*headers, method="GET", path="/page", kind="http", app=answers_everybody):
    """Send a request to the gate. Return (status or close code, headers, body)."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": kind, "method": method, "path": path, "headers": pairs, "query_string": b""}
    asyncio.run(Gate(app, LOGIN, open_paths=("/health",), sockets=True)(scope, receive, send))
    first = sent[0]
    return (
        first.get("status", first.get("code")),
        dict(first.get("headers", ())),
        b"".join(m.get("body", b"") for m in sent),
    )


def test_the_owner_comes_through_and_no_other_page_shows_it():
    status, headers, body = ask(HOST, KNOWN)
    assert (status, body) == (200, b"secret")
    assert headers == {b"x-frame-options": b"SAMEORIGIN"}
    assert ask(HOST, KNOWN, OWN, method="POST")[0] == 200
    assert ask(("host", "localhost:80"), KNOWN)[0] == ask(("host", "[::1]:80"), KNOWN)[0] == 200


def test_what_says_nothing_is_open_and_only_to_read():
    assert ask(HOST, path="/health")[0] == 200
    assert ask(HOST, path="/health", method="POST")[0] == 401
    assert ask(("host", "rebound.example"), path="/health")[0] == 403


@pytest.mark.parametrize(
    "authorization",
    [
        (),
        (("authorization", "Basic "),),
        (("authorization", KNOWN[1].removeprefix("Basic ")),),
        (("authorization", f"Bearer {LOGIN}"),),
        (("authorization", f"{KNOWN[1]}="),),
        (KNOWN, KNOWN),
        (("authorization", "Basic é"),),
    ],
)
def test_without_the_login_there_is_a_401_that_says_how_to_get_in(authorization):
    status, headers, body = ask(HOST, *authorization)
    assert status == 401
    assert headers[b"www-authenticate"].startswith(b"Basic ")
    assert b"make up" in body
    assert b"secret" not in body


@pytest.mark.parametrize(
    "headers",
    [
        (KNOWN,),
        (HOST, HOST, KNOWN),
        (("host", "rebound.example:4200"), KNOWN),
        (("host", "127.0.0.1.rebound.example"), KNOWN),
        (("host", "localhost:4200@rebound.example"), KNOWN),
        (HOST, KNOWN, ("origin", "http://elsewhere.example")),
        (HOST, KNOWN, ("origin", "null")),
        (HOST, KNOWN, ("origin", "http://127.0.0.1:9999")),
        (HOST, KNOWN, ("origin", "https://127.0.0.1:4200")),
        (HOST, KNOWN, OWN, ("origin", "http://elsewhere.example")),
        (
            HOST,
            KNOWN,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "image"),
        ),
        (HOST, KNOWN, ("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors")),
        (
            HOST,
            KNOWN,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "iframe"),
        ),
    ],
)
def test_what_a_browser_sends_for_another_page_is_refused_with_the_login_too(headers):
    for method in ("GET", "POST", "OPTIONS"):
        status, replied, body = ask(*headers, method=method)
        assert (status, b"secret" in body) == (403, False)
        assert b"access-control-allow-origin" not in replied


def test_a_link_on_another_page_may_be_followed_but_no_form_sent():
    came_from = (
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
    )
    assert ask(HOST, KNOWN, *came_from)[0] == 200
    assert ask(HOST, KNOWN, *came_from, method="POST")[0] == 403


def test_the_login_leaves_the_address_bar():
    status, headers, _ = ask(HOST, KNOWN, path="/login")
    assert (status, headers[b"location"]) == (303, b"http://127.0.0.1:4200/")
    assert ask(HOST, path="/login")[0] == 401


@pytest.mark.parametrize(
    "headers", [(HOST, OWN, KNOWN), (HOST, ("origin", "null")), (("host", "rebound.example"),), ()]
)
def test_a_websocket_of_a_page_is_closed_before_the_server_sees_it(headers):
    async def app(scope, receive, send):
        raise AssertionError("seen")

    assert ask(*headers, kind="websocket", app=app)[0] == 1008


def test_a_port_stays_taken_while_nobody_listens():
    with listener(0) as bound, pytest.raises(OSError, match="in use"):
        listener(bound.getsockname()[1])


async def counts_the_body(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind.endswith("shutdown"):
                return
    size, goes_on = 0, True
    while goes_on:
        message = await receive()
        size += len(message.get("body", b""))
        goes_on = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture
def connect(monkeypatch):
    """connect() -> a socket to a gate in a thread, which waits one second for a request."""
    monkeypatch.setattr(connection, "ARRIVAL_S", 1.0)
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 40)
    app = Gate(counts_the_body, LOGIN, open_paths=("/health",), sockets=True)
    with listener(0) as bound, contextlib.ExitStack() as stack:
        server = uvicorn.Server(listening(app))
        thread = Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()

        def opened():
            return stack.enter_context(socket.create_connection(bound.getsockname(), timeout=10))

        yield opened
        server.should_exit = True
        thread.join()


def answer(connected, *pieces, every_s=0.0):
    """Send the pieces. Return all bytes received until the server closes."""
    got = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connected.sendall(piece)
            time.sleep(every_s)
    with contextlib.suppress(ConnectionError):
        while piece := connected.recv(65536):
            got += piece
    return got


HEAD = f"POST /page HTTP/1.1\r\nHost: 127.0.0.1:1\r\nAuthorization: {KNOWN[1]}\r\n".encode()


def test_a_stranger_sends_no_head_without_an_end_and_no_half_request(connect):
    connected, sent = connect(), 0
    connected.sendall(b"GET /")
    with contextlib.suppress(ConnectionError):
        while sent < 8 << 20:
            connected.sendall(b"a" * 65536)
            sent += 65536
    assert sent < 8 << 20, "it is read for ever"
    assert answer(connect(), HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n").startswith(
        b"HTTP/1.1 431 "
    )
    began = time.monotonic()
    assert answer(connect(), HEAD).startswith(b"HTTP/1.1 408 ")
    assert answer(connect(), HEAD + b"Content-Length: 9\r\n\r\nhalf") == b""
    assert answer(connect()) == b""  # sends no request
    assert time.monotonic() - began < 8


def test_the_owner_sends_files_of_any_length_as_long_as_they_go_on(connect):
    pieces = [b"x" * 500_000] * 6
    head = HEAD + b"Connection: close\r\nContent-Length: 3000000\r\n\r\n"
    assert answer(connect(), head, *pieces, every_s=0.3).endswith(b"\r\n3000000\r\n0\r\n\r\n")
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"400\r\n" + b"x" * 1024 + b"\r\n"] * 10_000
    assert answer(connect(), head, *chunks, b"0\r\n\r\n").endswith(b"10240000\r\n0\r\n\r\n")


def test_a_thousand_connections_leave_the_owner_one(connect):
    idle = [connect() for _ in range(1_000)]
    assert sum(answer(connected) == b"" for connected in idle) == 1_000
    assert b"\r\n\r\n" in answer(connect(), HEAD + b"Connection: close\r\n\r\n")
