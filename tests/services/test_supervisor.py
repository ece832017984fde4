"""A dead service restarts, up to a limit.
tests/flows/test_deployments.py tests start, recovery and end of all services.
"""

import sys
from pathlib import Path

from agentgym.store.runstore import store_at
from services import supervisor
from services.supervisor import MAX_RESTARTS, OVERDUE_CHECK_S, Service, Undertaker


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


def test_once_a_step_has_lost_its_process_dead_runs_are_closed_now_and_after_a_leases_length(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    now, begun = [0.0], []

    class Child:
        def __init__(self, command, **_):
            begun.append((now[0], command[-1]))

        def poll(self):
            return 0

        terminate = wait = poll

    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervisor.subprocess, "Popen", Child)
    store = store_at(Path(".agentgym/store"), lease_ttl_s=30.0)
    undertaker = Undertaker()
    undertaker.look()  # looks for runs that died earlier
    with store.open("stage-1", "ab" * 32):
        for _ in range(20):
            now[0] += OVERDUE_CHECK_S
            undertaker.look()
        assert begun == [(0.0, "close-dead")]  # a live run needs no recovery process
    for _ in range(20):
        now[0] += OVERDUE_CHECK_S
        undertaker.look()
    undertaker.close()
    assert [at for at, _ in begun[1:]] == [21 * OVERDUE_CHECK_S, 24 * OVERDUE_CHECK_S]


def test_an_engine_is_kept_where_the_parameter_file_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    state, params = tmp_path / ".agentgym", tmp_path / "params.yaml"
    state.mkdir()
    for text, kept in (("seed: 1", False), ("no_key: 1", False), ("rollout: {engine: vllm}", True)):
        params.write_text(text)
        assert list(supervisor._engine(state)) == ["engine"] * kept
        assert (state / "engine").is_dir() == kept
