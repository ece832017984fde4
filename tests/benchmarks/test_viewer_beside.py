"""Results of training while the viewer runs, and the page that reports them."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/results/viewer_beside.json"


benchmark_of = imported("viewer_beside")


def test_a_fall_is_the_mean_of_the_pairs_with_students_interval(benchmark_of):
    # logarithms -0.01005 and -0.02020: mean -0.01513, standard error 0.00508, t of 1 degree 12.706
    told = benchmark_of.fall([(2.0, 1.98), (4.0, 3.92)])
    assert told == {"percent": 1.5, "low": -5.06, "high": 7.65}


def test_the_page_tells_what_was_measured(benchmark_of):
    if not RESULT.exists():
        pytest.skip("not measured yet: make measure NAME=viewer_beside")
    result = json.loads(RESULT.read_text())
    pairs = [(pair["alone"], pair["beside"]) for pair in result["steps_per_s"]]
    assert len(pairs) >= 4
    assert result["fall"] == benchmark_of.fall(pairs)
    assert result["fall"]["percent"] <= 2
    page = (ROOT / "docs/reference/viewer-index.md").read_text()
    assert benchmark_of.sentence(result) in " ".join(page.split())
