"""Many concurrent fleets leave no objects, and cost the API calls in docs/results/fleets.json."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "docs/results/fleets.json").read_text())


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("fleets")


def test_fifty_fleets_left_nothing():
    assert MEASURED["fleets"] == 50
    assert set(MEASURED["left_over"].values()) == {0}


@pytest.mark.kubernetes
def test_a_few_fleets_at_once_come_up_and_leave_nothing(kubeconfig, benchmark):
    found = benchmark.measure(kubeconfig, count=4, threads=4)
    print(json.dumps(found, indent=1))
    assert set(found["left_over"].values()) == {0}
    # a watch or a search for leftovers, more of them on a busy machine
    assert found["all_calls_per_fleet"] <= 2 * MEASURED["all_calls_per_fleet"]
    assert found["calls_per_fleet"]["server_side_apply"] == found["objects_per_fleet"] - 1
