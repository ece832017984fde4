"""What MLflow's pages cost a run, and how they open with two hundred runs, as committed."""

import json
from pathlib import Path

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/pages.json").read_text())

pages = imported("pages")


def test_pages_cost_a_run_little_and_open_with_two_hundred_runs(pages):
    cost = RESULT["cost"]
    extra = cost["with_s"] - cost["without_s"]
    assert extra > 0
    assert abs(cost["ratio"] - 1 - extra / cost["run_cpu_s"]) < 1e-3
    assert cost["ratio"] <= pages.MOST
    assert RESULT["runs"] == pages.RUNS == 200
    assert 0 < RESULT["opens"]["first_page_s"] <= 10
    assert 0 < RESULT["opens"]["charts_s"] <= 10
