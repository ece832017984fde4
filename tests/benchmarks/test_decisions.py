"""A comparison of equal policies rarely gives a verdict; the measured rates are committed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/decisions.json").read_text())


decisions = imported("decisions")


@pytest.mark.parametrize(("families", "samples"), [(0, 1), (0, 4), (10, 4)])
def test_equal_policies_are_seldom_told_apart(decisions, families, samples):
    """Run a reduced version of `make measure NAME=decisions`."""
    case = decisions.Case(100, samples, families, 0.0)
    said = decisions.simulate(case, 600, np.random.Generator(np.random.Philox(7)))["said"]
    assert said["ours"] < 0.08  # three standard errors above 5 %
    assert said["mean"] > 0.4
    if families:
        assert said["items"] > 0.15


def test_the_committed_decisions_hold_what_is_asked(decisions):
    false = RESULT["false_positives"]
    assert RESULT["simulations"] >= RESULT["simulations_unequal"] >= 5000
    assert false["ours_highest_upper_bound"] <= decisions.MOST_FALSE  # the worst over all designs
    assert false["mean_lowest"] >= 0.4
    assert false["items_highest_with_families"] > 2 * false["ours_highest"]
    asked = {(items, samples) for items in (100, 200, 500) for samples in (1, 4, 8)}
    told = {(each["items"], each["samples"]) for each in RESULT["cases"] if each["gain"] == 0.05}
    assert told == asked
    powers = {
        (each["items"], each["samples"]): each["said"]["ours"]
        for each in RESULT["cases"]
        if each["gain"] == 0.1 and not each["families"]
    }
    assert powers[500, 8] > powers[100, 8] > powers[100, 1]
