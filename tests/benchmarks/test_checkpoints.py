"""Two processes hold half of a model each, also while it is built, committed and resumed."""

import functools
import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/checkpoints.json").read_text())


checkpoints = imported("checkpoints")


@pytest.mark.integration
def test_each_of_two_ranks_holds_half_of_a_smaller_model(checkpoints, forks, tmp_path):
    smaller = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 16_000,
    }
    with (tmp_path / "log").open("w") as log:
        start = functools.partial(forks.start, stdout=log)
        found = checkpoints.compared(tmp_path, smaller, 1, start)
    assert found["num_parameters"] > 15e6
    for row in found["ranks"]:
        assert row["bytes"] > 3 * 4 * found["num_parameters"]  # weights and two moments
        for peaks in row["anonymous_mib_above_idle"].values():
            assert len(peaks) == 1
    shares = found["memory_of_two_to_one"]
    assert set(shares) == {"build", "commit", "resume"}
    # a smaller model's share is nearer to what any process takes; of a commit it was 0.59 to 0.78,
    # by how much else the machine did
    most = {"build": 0.75, "commit": 0.85, "resume": 0.75}
    assert all(0.3 < share <= most[phase] for phase, share in shares.items()), found


def test_what_was_measured_is_what_the_documents_say(checkpoints):
    assert RESULT["num_parameters"] > 0.49e9
    shares = RESULT["memory_of_two_to_one"]
    assert all(share <= checkpoints.MEMORY_LIMIT for share in shares.values())
    assert all(
        each <= checkpoints.TIME_LIMIT
        for row in RESULT["ranks"]
        for each in row["time_to_copy"].values()
    )
    page = " ".join((ROOT / "docs/operations.md").read_text().split())
    said = re.search(
        r"two ranks hold ([\d.]+) of what one holds while the model is built, ([\d.]+) while it is"
        r" committed, ([\d.]+) when it is resumed; against the disk's own copy of as many bytes a"
        r" commit takes ([\d.]+) times as long in one process and ([\d.]+) in two, a resume"
        r" ([\d.]+) and ([\d.]+)",
        page,
    )
    times = [
        row["time_to_copy"][phase] for phase in ("commit", "resume") for row in RESULT["ranks"]
    ]
    measured = [*(shares[phase] for phase in checkpoints.PHASES), *times]
    assert [float(each) for each in said.groups()] == [round(each, 2) for each in measured]
