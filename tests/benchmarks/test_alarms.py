"""Recorded runs of every recipe against the alarms as they are by default."""

import itertools
import json
from pathlib import Path

import pytest

from agentgym.tracking.points import RULES
from tests.benchmarks.conftest import imported

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/results/alarms.json"


alarms = imported("alarms")


@pytest.fixture(scope="module")
def ordinary(alarms):
    """Return (benchmark module, its recorded result)."""
    return alarms, json.loads(RESULT.read_text())


def test_an_ordinary_run_of_every_recipe_trips_none(ordinary):
    bench, recorded = ordinary
    assert recorded["runs"].keys() == bench.RUNS.keys()
    for name, row in recorded["runs"].items():
        points = bench.points(row)
        assert bench.rows(points) == row
        assert len(points) == 50
        assert bench.alarms_of(points) == set(), name
        assert bench.worst(points) == recorded["worst"][name]
    measured = set(itertools.chain.from_iterable(recorded["worst"].values()))
    assert measured == set(RULES)
    assert bench.text_of(recorded) == RESULT.read_text()


@pytest.mark.parametrize(
    ("name", "damage"), [("gradient", 100.0), ("throughput", 0.3)], ids=["gradient", "throughput"]
)
def test_a_recorded_run_that_is_damaged_from_some_step_on_trips_that_alarm_alone(
    ordinary, name, damage
):
    bench, recorded = ordinary
    metric = RULES[name].metrics[0]
    row = dict(recorded["runs"]["grpo"])
    row[metric] = [
        value if step < 30 or value is None else value * damage
        for step, value in enumerate(row[metric])
    ]
    assert bench.alarms_of(bench.points(row)) == {name}
