"""Access control for pages."""

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from agentgym.viewer.guard import LOOPBACK, Guard

TOKEN = "secret-token"


def client(token="", host="127.0.0.1:7340"):
    app = FastAPI()

    @app.get("/")
    def home():
        return {"ok": True}

    @app.post("/act")
    def act():
        return {"ok": True}

    guard = Guard(app, LOOPBACK, 7340, token)
    return TestClient(guard, base_url=f"http://{host}", follow_redirects=False)


@pytest.mark.parametrize("host", ["127.0.0.1:7340", "localhost:7340", "[::1]:7340"])
def test_loopback_names_are_known(host):
    assert client(host=host).get("/").status_code == 200


@pytest.mark.parametrize("host", ["evil.example:7340", "127.0.0.1:9", "127.0.0.1", "localhost"])
def test_other_names_are_refused_whoever_they_lead_to(host):
    assert client(host=host).get("/").status_code == 403


def test_pages_of_others_may_neither_read_nor_act():
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    ):
        assert client().post("/act", headers=headers).status_code == 403
        assert client().get("/", headers=headers).status_code == 403
    own = {"Origin": "http://127.0.0.1:7340", "Sec-Fetch-Site": "same-origin"}
    assert client().post("/act", headers=own).status_code == 200


def test_a_link_that_a_person_follows_is_theirs_and_a_form_of_others_is_not():
    followed = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert client().get("/", headers=followed).status_code == 200
    assert client().post("/act", headers=followed).status_code == 403
    framed = {**followed, "Sec-Fetch-Dest": "iframe"}
    assert client().get("/", headers=framed).status_code == 403


def test_every_answer_says_what_a_browser_may_do():
    for answer in (client().get("/"), client().get("/nowhere"), client(host="x").get("/")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"


def test_the_login_is_asked_for_and_no_cookie_is_set():
    asked = client(TOKEN)
    answer = asked.get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert asked.get("/", auth=("agentgym", "wrong")).status_code == 401
    assert asked.get("/", auth=("somebody", TOKEN)).status_code == 401
    assert asked.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert asked.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert asked.get("/login").status_code == 401
    answer = asked.get("/login", auth=("agentgym", TOKEN))
    assert answer.status_code == 303
    assert answer.headers["location"] == "http://127.0.0.1:7340/"
    assert "set-cookie" not in answer.headers
