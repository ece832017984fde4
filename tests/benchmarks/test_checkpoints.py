"""Two processes hold half of a model each, also while building, committing and resuming it."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/checkpoints.json").read_text())


checkpoints = imported("checkpoints")


@pytest.mark.slow
@pytest.mark.integration
def test_each_of_two_ranks_holds_half_of_a_smaller_model(checkpoints, tmp_path):
    smaller = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 16_000,
    }
    found = checkpoints.compared(tmp_path, smaller, 1)
    assert found["num_parameters"] > 15e6
    for row in found["ranks"]:
        assert row["bytes"] > 3 * 4 * found["num_parameters"]  # weights and two moments
        for peaks in row["anonymous_mib_above_idle"].values():
            assert len(peaks) == 1
    shares = found["memory_of_two_to_one"]
    assert set(shares) == {"build", "commit", "resume"}
    # a fixed cost per process weighs more on a small model; a commit's share was 0.59 to 0.78,
    # depending on the load of the machine
    most = {"build": 0.75, "commit": 0.85, "resume": 0.75}
    assert all(0.3 < share <= most[phase] for phase, share in shares.items()), found


def test_the_committed_measurement_holds_the_limits(checkpoints):
    assert RESULT["num_parameters"] > 0.49e9
    shares = RESULT["memory_of_two_to_one"]
    assert all(share <= checkpoints.MEMORY_LIMIT for share in shares.values())
    assert all(
        each <= checkpoints.TIME_LIMIT
        for row in RESULT["ranks"]
        for each in row["time_to_copy"].values()
    )
