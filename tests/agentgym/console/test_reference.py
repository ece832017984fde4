"""The yardstick is the same work on every machine."""

import time

from agentgym.console import reference


def test_more_rounds_take_longer_and_the_wall_time_holds_them(monkeypatch):
    monkeypatch.setattr(reference, "ROUNDS", 40)
    began = time.perf_counter()
    few = reference.reference_s()
    assert 0 < few <= time.perf_counter() - began
    calls = []
    monkeypatch.setattr(reference.json, "dumps", lambda value: calls.append(value) or "{}")
    reference.reference_s()
    assert len(calls) == 40 * 100
