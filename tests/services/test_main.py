"""Output and exit codes of `python -m services` up, down and status."""

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.store.lease import process_start
from services import __main__ as services
from services.__main__ import _listener, down, up
from services.state import running


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


def claim(state, pid, started, pids=None):
    content = {
        "pid": pid,
        "started": started,
        "prefect": "http://127.0.0.1:1",
        "mlflow": "http://127.0.0.1:2",
        "ready": True,
        "pids": pids or {},
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
    assert up(state, {}) == 1  # the supervisor lives but its services do not: an error
    said = capsys.readouterr().out
    assert said.startswith("already running\n")
    assert "http://127.0.0.1:1" in said
    assert "is being restarted" in said
    assert "prefect.yaml is not applied while the Prefect server is down" in said


def test_a_second_up_applies_prefect_yaml_and_says_what_changed(
    state, sleeper, capsys, monkeypatch
):
    claim(state, sleeper.pid, process_start(sleeper.pid), pids={"prefect": sleeper.pid})
    found = [["schedule nightly of pipeline/local: switched on"], []]
    monkeypatch.setattr(services, "apply", lambda running: found.pop(0))
    up(state, {})
    assert capsys.readouterr().out.splitlines()[:2] == [
        "already running",
        "applied  prefect.yaml: schedule nightly of pipeline/local: switched on",
    ]
    up(state, {})
    assert "applied  prefect.yaml: nothing in it has changed\n" in capsys.readouterr().out


def test_of_two_ups_at_one_moment_one_starts_the_services_and_the_other_says_that_they_run(
    state, sleeper, capsys, monkeypatch
):
    def start(*_):
        time.sleep(0.2)  # the other thread waits; without the lock it would start services, too
        claim(state, sleeper.pid, process_start(sleeper.pid))
        return sleeper

    monkeypatch.setattr(services, "_start_supervisor", start)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: up(state, {}), range(2)))
    said = capsys.readouterr().out
    assert said.count("starting Prefect, a worker, MLflow and the viewer") == 1
    assert said.count("already running\n") == 1
    assert said.count("http://127.0.0.1:1") == 2


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


@pytest.mark.parametrize(
    ("kept", "code"), [({}, 0), ({"engine": 1}, 0), ({"engine": None}, 1)], ids=str
)
def test_status_lists_a_kept_engine_and_is_0_if_all_services_run(
    state, sleeper, capsys, kept, code
):
    """The engine: not kept; running; dead after too many restarts."""
    pids = dict.fromkeys(["prefect", "worker", "mlflow", "viewer"], sleeper.pid)
    pids |= {name: sleeper.pid for name, runs in kept.items() if runs}
    claim(state, sleeper.pid, process_start(sleeper.pid), pids=pids)
    record = json.loads((state / "services.json").read_text())
    record["given_up"] = [name for name, runs in kept.items() if not runs]
    (state / "services.json").write_text(json.dumps(record))
    Path("prefect.toml").write_text("# mine\n")
    assert services.status(state) == code
    printed = capsys.readouterr().out
    assert ("engine   kept between runs" in printed) == bool(kept)
    # a user's prefect.toml has no login
    assert "PREFECT_API_URL=$(python -m services api) prefect deployment run" in printed
