"""A server's access control from outside: requests of web pages, strangers and broken clients, on
raw sockets to a real process.
"""

import concurrent.futures
import json
import socket
import struct
import time
from pathlib import Path

import pytest

from envs.__main__ import main
from envs.doors import is_own
from tests.envs.raw import CREATE, exchange, refusal, request, started


def num_sessions(address):
    return json.loads(exchange(address, request("/info"))[1])["active_sessions"]


def metric(address, line):
    text = exchange(address, request("/metrics"))[1].decode()
    return next(
        (float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(line)), 0.0
    )


@pytest.mark.parametrize("route", ["/create", "/agentgym/create"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None],
)
def test_a_body_that_is_not_json_opens_no_session(server, route, kind):
    """A web page may send these anywhere without a preflight; they once filled all sessions."""
    address, _ = server
    for number in range(3):
        assert refusal(exchange(address, request(route, CREATE % number, Content_Type=kind))) == (
            415,
            "bad_request",
        )
    assert num_sessions(address) == 0


def test_json_is_taken_with_a_charset_and_a_client_of_agentgym_may_send_no_body(server):
    address, _ = server
    created = exchange(
        address, request("/create", CREATE % 90, Content_Type="Application/JSON; charset=utf-8")
    )
    assert created[0] == 200
    body = json.dumps({"session_id": json.loads(created[1])["session_id"]}).encode()
    assert exchange(address, request("/close", body)) == (200, b'{"closed":true}')
    bare = request(
        "/agentgym/create",
        method="POST",
        Content_Length=0,
        User_Agent="python-requests/2.32",
        Accept="*/*",
    )
    assert exchange(address, bare)[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"]
)
def test_a_page_of_another_origin_is_refused_whatever_it_sends(server, origin):
    address, _ = server
    host = "{}:{}".format(*address)
    for data in (
        request("/create", CREATE % 1, Origin=origin, Host=host),
        request("/agentgym/create", method="POST", Content_Length=0, Origin=origin, Host=host),
        request("/info", Origin=origin, Host=host),
        request(
            "/create",
            method="OPTIONS",
            Origin=origin,
            Host=host,
            Access_Control_Request_Method="POST",
        ),
    ):
        assert refusal(exchange(address, data)) == (403, "forbidden")
    assert exchange(address, request("/info", Origin=f"http://{host}", Host=host))[0] == 200
    assert num_sessions(address) == 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "10.1.2.3",
        "127.0.0.1.evil.example",
        "",
        "a b",
    ],
)
@pytest.mark.parametrize("route", ["/info", "/metrics", "/healthz"])
def test_a_foreign_host_reads_nothing(server, route, host):
    assert refusal(exchange(server[0], request(route, Host=host))) == (403, "forbidden")


def test_a_request_without_a_host_is_refused(server):
    assert refusal(exchange(server[0], request("/info", Host=None))) == (403, "forbidden")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "localhost.", "127.0.0.1:80", "127.0.0.2", "[::1]:80"]
)
def test_names_of_loopback_are_taken_with_any_port(server, host):
    assert exchange(server[0], request("/info", Host=host))[0] == 200


def test_a_host_may_be_the_address_asked_or_a_configured_name():
    names = ("env-babyai", ".pods.test")
    for host in (
        "10.0.0.5",
        "10.0.0.5:8000",
        "env-babyai:8000",
        "ENV-babyai.",
        "a.pods.test",
        "localhost",
    ):
        assert is_own(host, "10.0.0.5", names), host
    for host in (
        "10.0.0.6",
        "env-babyai.evil",
        "pods.test",
        "xpods.test",
        "user@localhost",
        "[fd00::5]",
        "localhost:80:80",
    ):
        assert not is_own(host, "10.0.0.5", names), host
    assert is_own("[FD00::5]:8000", "fd00::5", ())
    assert is_own("10.0.0.5", "::ffff:10.0.0.5", ())  # a dual-stack socket


def test_configured_names_and_probes_of_a_pod_pass(tmp_path):
    """A probe uses the pod's address, has no token and is accepted; every other request needs the
    token.
    """
    with started(tmp_path, "--allow-host", "env-babyai", host="127.0.0.3", token="hush-hush") as (
        address,
        log,
    ):
        for route in ("/healthz", "/readyz", "/metrics"):
            assert exchange(
                address, request(route, Host="127.0.0.3:8000", User_Agent="kube-probe/1.35")
            )[0] in (200, 503)
        assert refusal(exchange(address, request("/info", Host="127.0.0.3:8000"))) == (
            401,
            "unauthorized",
        )
        told = exchange(
            address, request("/info", Host="env-babyai:8000", Authorization="Bearer hush-hush")
        )
        assert json.loads(told[1])["env"] == "babyai"
        assert refusal(
            exchange(address, request("/info", Host="other", Authorization="Bearer hush-hush"))
        ) == (403, "forbidden")
        pid = json.loads(told[1])["pid"]
        assert b"hush-hush" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert "hush-hush" not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "",
            "0.0.0.0 is reached from other machines: set AGENTGYM_ENV_TOKEN",
        ),
        (["--host", "::"], "", ":: is reached from other machines"),
        (["--no-token"], "hush-hush", "--no-token was given, and AGENTGYM_ENV_TOKEN is set"),
        ([], "two words", "AGENTGYM_ENV_TOKEN must be of printable ASCII"),
        (["--allow-host", "http://x:80"], "", "is not a host name; leave scheme and port out"),
    ],
)
def test_a_server_that_others_could_reach_needs_a_token_or_a_word(
    arguments, token, message, monkeypatch, capsys
):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", token)
    try:
        code = main(["serve", "babyai", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    told = capsys.readouterr().err
    assert message in told.splitlines()[-1]
    assert "hush-hush" not in told


def test_a_server_may_be_opened_to_others_on_purpose(tmp_path):
    with started(tmp_path, "--no-token", host="0.0.0.0") as (address, _):
        assert exchange(address, request("/info"))[0] == 200


@pytest.mark.parametrize("route", ["/create", "/step", "/agentgym/create", "/agentgym/reset"])
def test_a_request_cut_off_by_the_client_is_no_crash(server, route):
    address, log = server
    before = metric(address, 'env_errors_total{kind="env_crashed"}')
    for _ in range(3):
        with socket.create_connection(address, timeout=5) as connected:
            connected.sendall(request(route, b'{"id": 1, ' + b" " * 100)[:-50])
            time.sleep(0.05)
        with socket.create_connection(address, timeout=5) as connected:  # and for a reset
            connected.sendall(request(route, b'{"id": 1, ' + b" " * 100)[:-50])
            time.sleep(0.05)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert metric(address, 'env_errors_total{kind="env_crashed"}') == before == 0
    assert "Traceback" not in log.read_text()


def test_a_page_cannot_fill_the_sessions(server):
    """A page sends requests without a preflight as fast as it can; another client still gets a
    session.
    """
    address, _ = server
    evil = {"Origin": "http://evil.example", "Content_Type": "text/plain"}

    def fill(part):
        return [
            exchange(address, request("/create", CREATE % number, **evil))[0]
            for number in range(part, 300, 4)
        ]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = {status for part in pool.map(fill, range(4)) for status in part}
    assert statuses == {403}
    assert num_sessions(address) == 0
