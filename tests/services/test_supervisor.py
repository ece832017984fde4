"""A service that dies is started again, within bounds.
That everything comes up, recovers and ends is in tests/flows/test_deployments.py.
"""

import sys

from services import supervisor
from services.supervisor import MAX_RESTARTS, Service


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
