"""`agentgym view`."""

import json
import re
import socket
import stat
import subprocess
import sys
import urllib.request

import pytest

from agentgym.cli import main
from agentgym.commands.view import _listener, own_token
from agentgym.config import ConfigError
from tests.agentgym.viewer.conftest import Made, episode, failed


@pytest.fixture
def made(tmp_path):
    made = Made(tmp_path / "state")
    made.add([episode(0), failed(1)])
    return made


def test_a_token_is_kept_for_the_owner_alone(tmp_path):
    folder = tmp_path / "viewer"
    token = own_token(folder)
    assert len(token) >= 32
    assert own_token(folder) == token
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    (folder / "token").write_text("short")
    assert own_token(folder) not in (token, "short")


def test_a_port_that_is_taken_is_told_and_the_usual_one_replaced(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {taken} .*--port"),
            _listener("127.0.0.1", taken),
        ):
            pass
        monkeypatch.setattr("agentgym.commands.view.PORT", taken)
        with _listener("127.0.0.1", None) as bound:
            assert bound.getsockname()[1] not in (0, taken)


def test_episodes_are_taken_away_without_a_server(made, tmp_path, capsys):
    store = f"store.path={made.folder / 'store'}"
    out = ["--bundle", str(tmp_path / "bundle"), "--jsonl", str(tmp_path / "lines")]
    assert main(["view", "--set", store, *out, "--query", "success=no"]) == 0
    assert capsys.readouterr().out.startswith("1 episodes: ")
    (line,) = (tmp_path / "lines").read_text().splitlines()
    assert json.loads(line)["item"]["task_id"] == 1
    assert (tmp_path / "bundle/e/0000.html").is_file()
    published = ["--agentgym", str(tmp_path / "own.json"), "--query", "success=yes"]
    assert main(["view", "--set", store, *published]) == 0
    assert capsys.readouterr().out.startswith("1 trajectories: ")
    (row,) = json.loads((tmp_path / "own.json").read_text())
    assert row["item_id"] == "babyai_0"
    assert main(["view", "r0123", "--set", store, *published]) == 2
    assert "no run of this store begins with r0123" in capsys.readouterr().err
    assert main(["view", "--set", store, *out, "--query", "sort=x"]) == 2
    assert "--query: sort 'x' is none of" in capsys.readouterr().err
    assert main(["view", "--set", store, *out, "--query", "step=stage-1&success=no"]) == 2
    assert "--query: step is no filter; expected run, stage, " in capsys.readouterr().err
    assert main(["view", "--set", store, "--query", "success=no"]) == 2
    assert "--query goes with --bundle, --jsonl or --agentgym" in capsys.readouterr().err


@pytest.mark.integration
def test_it_serves_the_store_to_who_has_the_printed_link(made):
    command = [sys.executable, "-m", "agentgym", "view", "--port", "0"]
    command += ["--set", f"store.path={made.folder / 'store'}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = server.stdout.readline()
        token, address = re.search(r"http://agentgym:(\S+)@(\S+)/login", said).groups()
        request = urllib.request.Request(
            f"http://{address}/healthz", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.read() == b"ok"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{address}/", timeout=60)
        endless = urllib.request.Request(f"http://{address}/", headers={"X": "y" * 20_000})
        with pytest.raises(urllib.error.HTTPError, match="431"):
            urllib.request.urlopen(endless, timeout=60)
    finally:
        server.terminate()
        server.wait(30)
