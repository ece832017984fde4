"""A server process, and raw requests to it."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager

from tests.waiting import text_of

SERVE = [sys.executable, "-m", "envs", "serve", "babyai"]
CREATE = b'{"request_key": "%d", "task_id": 0}'


@contextmanager
def started(folder, *arguments, host="127.0.0.1", token=""):
    """Yield ((host, port), log file) of a server process."""
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
        port = int(text_of(port_file, process, log))
        yield (host if host != "0.0.0.0" else "127.0.0.1", port), log
    finally:
        process.terminate()
        process.wait(10)


def request(route, body=None, method=None, **headers):
    """Return the bytes of a request. A header of None is omitted."""
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
    """Return (status, body) of the first response; (0, b"") if the connection just closed."""
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
