"""What the default pipeline costs beside earlier commits of it, as committed."""

import json
import statistics
from pathlib import Path

import pytest

RESULT = json.loads((Path(__file__).resolve().parents[2] / "docs/results/cost.json").read_text())
# commit of before, most CPU-seconds beside it
BOUNDS = {"before": ("190d101c30b5", 0.6), "notebook": ("c0411fe7b0c8", 1.05)}


@pytest.mark.parametrize("case", BOUNDS)
def test_the_default_pipeline_costs_no_more_than_asked_and_is_as_good(case):
    commit, most = BOUNDS[case]
    found = RESULT[case]
    before, after = (found[side]["runs"] for side in ("before", "after"))
    assert found["before"]["commit"] == commit
    assert len(before) == len(after) >= 2
    cpu, success = (
        [statistics.fmean(run[name] for run in runs) for runs in (before, after)]
        for name in ("cpu_s", "sampled_success")
    )
    assert found["cpu_ratio"] == round(cpu[1] / cpu[0], 3) <= most
    assert success[1] >= success[0] - 0.02
