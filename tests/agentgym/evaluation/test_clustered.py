"""Intervals over items and families: against numbers worked out by hand, and against worlds whose
truth is known.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from agentgym.evaluation.intervals import clustered_interval, family_codes, moments
from tests.benched import benchmark

NAN = float("nan")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def intervals():
    return benchmark("intervals")


def test_without_families_it_is_the_t_interval_everybody_knows():
    values = np.array([0.1, -0.4, 0.4, 0.5, -0.3, 0.5, -0.2, NAN])
    found = clustered_interval(values, kind="number", confidence=0.9)
    own = values[:-1]
    half = student.ppf(0.95, 6) * own.std(ddof=1) / np.sqrt(7)
    assert (found.mean, found.low, found.high, found.num_items) == pytest.approx(
        (own.mean(), own.mean() - half, own.mean() + half, 7)
    )


def test_a_large_family_outweighs_the_others_and_leaves_fewer_degrees_of_freedom():
    sizes = [50, 2, 2, 2]
    codes = np.repeat(np.arange(4), sizes)
    values = np.random.default_rng(1).normal(size=(1, codes.size))
    # by matrices: B of Bell and McCaffrey, trace squared over the trace of its square
    total, center = codes.size, np.eye(codes.size) - 1 / codes.size
    rows = [
        center @ (codes == g) / total / np.sqrt(1 - size / total) for g, size in enumerate(sizes)
    ]
    gram = np.array(rows) @ np.array(rows).T
    freedom = np.trace(gram) ** 2 / np.trace(gram @ gram)
    assert 1 < freedom < 2
    assert moments(values, codes, kind="number").freedom.item() <= freedom + 1e-9


def test_fewer_than_five_families_are_no_clusters():
    assert family_codes(None) is None
    assert family_codes(["a", "b", "c", "d", "a"]) is None
    assert family_codes(["b", "a", "b", None, "c", "d"]).tolist() == [0, 1, 0, 2, 3, 4]


def test_a_difference_of_nothing_keeps_a_width_and_a_p_of_one():
    found = moments(np.zeros((1, 100)), kind="difference")
    assert found.p_value().item() == 1.0
    assert np.sqrt(found.variance.item()) == pytest.approx(np.sqrt(2) / 102)
    with pytest.raises(ValueError, match="all missing"):
        clustered_interval(np.array([NAN]), kind="share", confidence=0.95)


@pytest.mark.parametrize("families", [0, 5, 30])
@pytest.mark.parametrize("kind", ["share", "difference"])
def test_the_interval_covers(intervals, families, kind):
    """A reduced twin of `make measure NAME=intervals`."""
    shift = 0.7 if families else 0.0
    world = intervals.FamiliesWorld(kind, "avg", 0.3, 120, 4, 1.0, families, shift)
    generator = np.random.Generator(np.random.Philox(5))
    found = intervals.simulate_families(world, 3000, generator)["coverage"]
    assert found["ours"] >= 0.92
    if families:  # what it would be to take every item for itself
        assert found["items"] < 0.9
        assert found["bootstrap"] < found["ours"]
    else:
        assert found["ours"] <= 0.98


def test_the_committed_coverage_is_within_the_band():
    found = json.loads((ROOT / "docs/results/clusters.json").read_text())
    low, high = found["band"]
    assert (low, high) == (0.93, 0.97)
    assert found["simulations"] >= 10_000
    above = [each for each in found["cells"] if each["inside"] and each["coverage"]["ours"] > high]
    assert found["outside_band"] == above
    known = {(50, 1, 0.1), (50, 1, 0.9)}  # Wilson's own exact coverage there is 97.03 %
    assert {(each["items"], each["samples"], each["success"]) for each in above} == known
    inside = found["inside"]["ours"]
    assert low <= inside["lowest"]
    assert found["outside"]["ours"]["lowest"] >= low
    assert found["inside"]["items"]["lowest"] < 0.8
    assert found["outside"]["bootstrap"]["lowest"] < 0.8  # why it is not the product's
