"""The gate before an app that answers everybody; with the real servers behind it:
tests/flows/test_deployments.py.
"""

import asyncio
from base64 import b64encode

import pytest

from services.gate import Gate, listener

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
    """(status or close code, headers, body) of what the gate sends."""
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
