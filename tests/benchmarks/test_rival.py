"""Episodes per second are counted in the same way for ours and for another trainer."""

import json
import statistics
from pathlib import Path

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/rival.json").read_text())


rival = imported("rival")


def test_rates_begin_with_the_end_of_the_first_optimizer_step(rival):
    # step 1 ends at 10 s, steps 2 and 3 take 2 s each; CPU grows by 1.5 a second
    rows = [
        {"time": 10.0, "episodes": 128, "reward": 0.25},
        {"time": 12.0, "episodes": 128, "reward": 0.5},
        {"time": 14.0, "episodes": 64, "reward": 0.75},
    ]
    samples = [(float(at), 1.5 * at, at << 20) for at in range(20)]
    assert rival.rates(rows, samples) == {
        "episodes_per_s": 48.0,
        "step_s": 2.0,
        "cpu_step_s": 3.0,
        "peak_mib": 19,
        "success_first": 0.25,
        "success_last_3": 0.5,
    }


def test_the_best_of_the_other_ways_counts(rival):
    rates = {"ours": 90.0, "rollout_func, 1 threads": 30.0, "rollout_func, 2 threads": 60.0}
    assert rival.ratio({name: {"episodes_per_s": each} for name, each in rates.items()}) == 1.5


def test_the_result_follows_from_its_runs(rival):
    for name, runs in RESULT["runs"].items():
        for metric, value in RESULT["ways"][name].items():
            assert value == statistics.median(run[metric] for run in runs)
    assert RESULT["ratio"] == rival.ratio(RESULT["ways"])
    # both trainers reach similar success
    last = [each["success_last_3"] for each in RESULT["ways"].values()]
    assert max(last) - min(last) < 0.15
