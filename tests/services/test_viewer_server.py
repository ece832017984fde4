"""The viewer as a service of `make up`: the real one, in a separate process."""

import os
import socket
import time
import urllib.error
import urllib.request

import pytest

from agentgym.deploy.owned import owned_process, tail
from services.supervisor import OURS, VIEWER_LOGIN, healthy


def get(address, login=""):
    request = urllib.request.Request(address)
    if login:
        import base64

        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    return urllib.request.urlopen(request, timeout=60)


def test_it_answers_its_owner_alone_and_ends_with_its_owner(tmp_path):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        command = [*OURS, "viewer", str(bound.fileno())]
        env = {VIEWER_LOGIN: "agentgym:secret", "PYTHONPATH": os.getcwd()}
        with owned_process(
            command, log_path=tmp_path / "log", env=env, pass_fds=(bound.fileno(),)
        ) as process:
            deadline = time.monotonic() + 120
            while not healthy(f"{address}/healthz"):
                assert process.poll() is None, tail(tmp_path / "log")
                assert time.monotonic() < deadline, tail(tmp_path / "log")
                time.sleep(0.1)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(f"{address}/")
            with get(f"{address}/", "agentgym:secret") as page:
                assert b"<h1>Runs and evaluations</h1>" in page.read()
                assert page.headers["content-security-policy"].startswith("default-src 'self'")
