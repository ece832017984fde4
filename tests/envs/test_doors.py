"""A server's doors, from outside: what pages, strangers and broken clients send, on raw sockets
to a real process.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from envs import connection
from envs.__main__ import main
from envs.doors import is_own

SERVE = [sys.executable, "-m", "envs", "serve", "babyai"]
CREATE = b'{"request_key": "%d", "task_id": 0}'


@contextmanager
def started(folder, *arguments, host="127.0.0.1", token=""):
    """((host, port), log file) of a server process."""
    port_file, log = folder / "port", folder / "log"
    environment = {
        name: value for name, value in os.environ.items() if name != "AGENTGYM_ENV_TOKEN"
    }
    if token:
        environment["AGENTGYM_ENV_TOKEN"] = token
    with log.open("wb") as output:
        command = [*SERVE, "--host", host, "--port-file", str(port_file), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 30
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield (host if host != "0.0.0.0" else "127.0.0.1", int(port_file.read_text())), log
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An ordinary one on loopback, without a token."""
    with started(tmp_path_factory.mktemp("server"), "--drain-timeout", "0.1") as found:
        yield found


def request(route, body=None, method=None, **headers):
    """Bytes of a request. A header of None is left out."""
    fields = {
        "Host": "127.0.0.1",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    if body is not None:
        fields = {"Content-Type": "application/json", "Content-Length": len(body), **fields}
    lines = [f"{method or ('GET' if body is None else 'POST')} {route} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def exchange(address, data, timeout=10):
    """(status, body) of the first answer; (0, b"") where the connection was closed without one."""
    with socket.create_connection(address, timeout=timeout) as connected:
        connected.sendall(data)
        return answer(connected)


def answer(connected):
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connected.recv(65536)
        if not piece:
            return 0, got
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += connected.recv(65536)
    return int(head.split()[1]), body


def refusal(answered):
    status, body = answered
    return status, json.loads(body)["kind"]


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
    """These a page may send to any address without asking; a page filled all sessions so."""
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
    assert is_own("10.0.0.5", "::ffff:10.0.0.5", ())  # a socket of both families


def test_configured_names_and_probes_of_a_pod_pass(tmp_path):
    """A probe asks by the pod's address, bears no token and is answered; nothing else is
    without the token.
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
            # ours grows to four megabytes where the server is slow
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            connected.sendall(beginning)
            while part < most:
                connected.sendall(more)
                part += len(more)
        sent += part
        assert part < most, "it is read for ever"
    assert memory_kib(address) - before < 8192
    assert sent < num_connections * (4 << 20)  # what the buffers of two sockets hold, and not more


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
    """(address, sessions) of a server of 4 sessions in a thread, with other limits of its
    connections.
    """
    for name, value in limits.items():
        monkeypatch.setattr(connection, name, value)
    with serving("babyai", max_sessions=4) as (endpoint, sessions):
        yield ("127.0.0.1", int(endpoint.rpartition(":")[2])), sessions


def ended(connected):
    """Whether the server has closed."""
    try:
        return connected.recv(65536) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("at_once", "slowly", "status"),
    [
        (b"", request("/info"), 408),
        # it is being answered: there is only the connection to close
        (request("/create", b" " * 60)[:-60], b" " * 60, 0),
        (b"", b"\r\n" * 30, 408),
        (b"", b"", 0),  # nothing is asked for
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
            time.sleep(0.5)  # longer than a request may take to arrive
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
        others = [connect() for _ in range(9)]  # two for each of 4 sessions, and 2 to spare
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
        for number in range(2, 5):  # a few may be
            connected = stack.enter_context(socket.create_connection(address, timeout=5))
            connected.sendall(request("/info") * number)
            got = b""
            while got.count(b'"pid"') < number:
                piece = connected.recv(65536)
                assert piece
                got += piece


@pytest.mark.parametrize("route", ["/create", "/step", "/agentgym/create", "/agentgym/reset"])
def test_a_request_cut_off_by_the_client_is_no_crash(server, route):
    address, log = server
    before = metric(address, 'env_errors_total{kind="env_crashed"}')
    for _ in range(3):
        with socket.create_connection(address, timeout=5) as connected:
            connected.sendall(request(route, b'{"id": 1, ' + b" " * 100)[:-50])
            time.sleep(0.05)
        with socket.create_connection(address, timeout=5) as connected:  # and by a reset
            connected.sendall(request(route, b'{"id": 1, ' + b" " * 100)[:-50])
            time.sleep(0.05)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert metric(address, 'env_errors_total{kind="env_crashed"}') == before == 0
    assert "Traceback" not in log.read_text()


def test_a_page_cannot_fill_the_sessions(server):
    """What a page can send without asking, as fast as it goes; another client still gets a
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
