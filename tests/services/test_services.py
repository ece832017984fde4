"""The supervisor's bookkeeping; that everything comes up, recovers and ends is in
tests/flows/test_deployments.py.
"""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.store.lease import process_start
from services import supervisor
from services.__main__ import _listener, down, status, up
from services.state import TOML, TOML_MARK, is_stale, running
from services.supervisor import MAX_RESTARTS, Service


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".agentgym").mkdir()
    return Path(".agentgym")


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def claim(state, pid, started):
    content = {
        "pid": pid,
        "started": started,
        "prefect": "http://127.0.0.1:1",
        "mlflow": "http://127.0.0.1:2",
        "ready": True,
        "pids": {},
    }
    (state / "services.json").write_text(json.dumps(content))


def test_a_process_that_took_the_pid_of_a_dead_supervisor_is_not_ours_and_is_not_killed(
    state, sleeper, capsys
):
    claim(state, sleeper.pid, "1")
    assert running(state) is None
    assert down(state) == 0
    assert capsys.readouterr().out == "nothing is running\n"
    assert sleeper.poll() is None
    assert not (state / "services.json").exists()


def test_a_supervisor_of_that_pid_and_start_time_is_ended(state, sleeper, capsys):
    claim(state, sleeper.pid, process_start(sleeper.pid))
    assert running(state).pid == sleeper.pid
    assert down(state) == 0
    assert sleeper.wait(10) == -signal.SIGTERM
    assert capsys.readouterr().out.startswith("stopped")


def test_a_second_up_says_what_runs_and_starts_nothing(state, sleeper, capsys):
    claim(state, sleeper.pid, process_start(sleeper.pid))
    assert up(state, None, None) == 1  # its services are gone, and it says so
    said = capsys.readouterr().out
    assert said.startswith("already running\n")
    assert "http://127.0.0.1:1" in said
    assert "is being restarted" in said


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_state_file_counts_as_nothing_running(state, content, capsys):
    (state / "services.json").write_text(content)
    assert running(state) is None
    assert status(state) == 1
    assert capsys.readouterr().out == "nothing is running; `make up` starts it\n"


def test_a_prefect_toml_of_ones_own_is_neither_removed_nor_called_stale(state):
    TOML.write_text('[api]\nurl = "http://elsewhere/api"\n')
    assert not is_stale(state)
    assert down(state) == 0
    assert TOML.exists()
    TOML.write_text(f"{TOML_MARK}\n")
    assert is_stale(state)
    assert down(state) == 0
    assert not TOML.exists()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_the_usual_one_is_replaced():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {taken} cannot be used .* make up PREFECT_PORT="
        ):
            _listener(taken, 4200, "PREFECT_PORT")
        with _listener(None, taken, "PREFECT_PORT") as bound:
            assert bound.getsockname()[1] not in (0, taken)


def test_a_service_that_dies_is_started_again_and_stays_down_when_it_dies_too_often(
    tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    service = Service(
        "broken", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path / "log", {}
    )
    starts = 0
    for _ in range(40):
        if service.keep() and service.process is not None:
            starts += 1
            service.process.wait(30)
        now[0] += 10
    assert starts == MAX_RESTARTS + 1
    assert service.given_up
    assert service.process is None
    assert (tmp_path / "log").read_text() == "why\n" * starts
