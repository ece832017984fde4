"""The command line of an environment server, as processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from envs import __main__ as command
from envs.__main__ import _parser
from envs.connection import server_config
from envs.sessions import CLOSE_S, ServerSettings
from tests.completed import completed
from tests.waiting import wait_until

pytestmark = pytest.mark.integration
SERVE = [sys.executable, "-m", "envs", "serve"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["babyay"], "unknown environment 'babyay'; did you mean 'babyai'?"),
        (["babyai", "--options", "{"], "--options is not JSON"),
        (["babyai", "--options", "[1]"], "--options must be a JSON object"),
        (["babyai", "--options", '{"veiw": 1}'], "did you mean 'view'?"),
        (["babyai", "--max-sessions", "0"], "not positive"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(arguments, message, capsys):
    try:
        code = command.main(["serve", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def identities(name, ids, **options):
    command = [sys.executable, "-m", "envs", "identities", name, "--options", json.dumps(options)]
    return completed(*command, input=ids if isinstance(ids, str) else json.dumps(ids), timeout=60)


@pytest.mark.parametrize(
    ("name", "options", "same", "other"),
    [
        ("babyai", {}, (53, 135), 0),  # one world of two seeds
        ("textcraft", {"max_depth": 1}, (3, 127), 4),  # 124 goals of one level
        ("searchqa", {}, (0, 1200), 1),  # 1,200 test questions
    ],
)
def test_ids_of_one_task_have_one_digest(name, options, same, other):
    ended = identities(name, [*same, other], **options)
    assert ended.returncode == 0, ended.stderr
    first, second, third = json.loads(ended.stdout)
    assert first == second != third
    assert len(first) == 32


@pytest.mark.parametrize("ids", ["[1, ", "{}", "[true]", "[-1]", '["1"]', ""])
def test_what_is_no_list_of_task_ids_is_refused_in_one_line(ids):
    ended = identities("textcraft", ids)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "standard input must be a JSON list of task ids" in ended.stderr.splitlines()[-1]


@contextlib.contextmanager
def started(tmp_path, *arguments, **popen):
    port_file = tmp_path / "port"
    process = subprocess.Popen(
        [*SERVE, "babyai", "--port-file", str(port_file), *arguments],
        stderr=subprocess.DEVNULL,
        **popen,
    )
    try:
        wait_until(port_file.exists, 20)
        yield process, f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.kill()
        process.wait()


def call(url, body=None, token=""):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=5) as reply:
        return json.loads(reply.read())


def test_sigterm_lets_open_sessions_finish_and_then_ends_with_code_0(tmp_path):
    with started(tmp_path, "--drain-timeout", "20") as (process, url):
        session = call(f"{url}/create", {"request_key": "k", "task_id": 0})["session_id"]
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        assert (
            call(f"{url}/step", {"session_id": session, "turn": 1, "action": "turn left"})["turn"]
            == 1
        )
        with pytest.raises(urllib.error.HTTPError, match="503"):
            call(f"{url}/create", {"request_key": "late", "task_id": 0})
        call(f"{url}/close", {"session_id": session})
        assert process.wait(5) == 0


def test_a_server_whose_sessions_nobody_closes_ends_within_the_usual_30_seconds():
    asked = _parser().parse_args(["serve", "babyai"])
    waits = server_config(None, 1).timeout_graceful_shutdown
    assert asked.drain_timeout == ServerSettings().drain_timeout_s
    assert asked.drain_timeout + waits + CLOSE_S < 30


def test_ctrl_c_ends_at_once_with_code_130(tmp_path):
    with started(tmp_path) as (process, url):
        call(f"{url}/create", {"request_key": "k", "task_id": 0})
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert list(tmp_path.iterdir()) == []  # the port file is removed, too


def test_the_server_ends_when_its_owner_closes_the_pipe_even_with_open_sessions(tmp_path):
    with started(tmp_path, "--owner-pipe", stdin=subprocess.PIPE) as (process, url):
        call(f"{url}/create", {"request_key": "k", "task_id": 0})
        process.stdin.close()
        assert process.wait(5) == 0


OWNER = """
import sys, time
from pathlib import Path
from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
with local_env(EnvConfig(), expert=False, log_path=Path(sys.argv[1])) as endpoints:
    print(endpoints[0], endpoints[0].token, flush=True)
    time.sleep(60)
"""


def test_the_server_ends_within_seconds_of_its_owner_being_killed_and_leaves_its_log_alone(
    tmp_path,
):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    try:
        url, token = owner.stdout.readline().split()
        pid = call(f"{url}/info", token=token)["pid"]
    finally:
        owner.kill()
        owner.wait()

    def is_gone():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # in a container without an init process an orphan stays a zombie
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"

    wait_until(is_gone, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_package_that_is_missing_is_one_line_and_code_2(monkeypatch, capsys):
    def load(name, options):
        raise ModuleNotFoundError("No module named 'minigrid'")

    monkeypatch.setattr(command, "load_spec", load)
    assert command.main(["serve", "babyai"]) == 2
    assert capsys.readouterr().err == (
        "python -m envs: babyai needs a package that is not installed here: No module named"
        " 'minigrid'\n"
    )
