"""The yardstick is the same work on every machine."""

import time

from agentgym.console import doctor


def test_more_rounds_take_longer_and_the_wall_time_holds_them(monkeypatch):
    monkeypatch.setattr(doctor, "ROUNDS", 40)
    began = time.perf_counter()
    few = doctor.reference_s()
    assert 0 < few <= time.perf_counter() - began
    calls = []
    monkeypatch.setattr(doctor.json, "dumps", lambda value: calls.append(value) or "{}")
    doctor.reference_s()
    assert len(calls) == 40 * 100
