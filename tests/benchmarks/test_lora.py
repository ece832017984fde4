"""An adapter learns the default task with every seed, and its merged weights act as it does."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/lora.json").read_text())


lora = imported("lora")


@pytest.mark.parametrize(
    ("low", "same", "holds"), [(0.02, 512, True), (-0.01, 512, False), (0.02, 511, False)]
)
def test_a_seed_without_a_gain_or_with_another_action_is_none_that_holds(lora, low, same, holds):
    runs = [
        {
            "start": {"mean": 0.5},
            "end": {"mean": 0.9},
            "gain": {"low": gain},
            "greedy": {"items": 512, "same": equal, "actions": 2000},
        }
        for gain, equal in ((0.3, 512), (low, same))
    ]
    found = lora.verdict(runs)
    assert found["ok"] is holds
    assert (found["start"], found["end"], found["actions"]) == ([50.0] * 2, [90.0] * 2, 4000)


def test_three_seeds_learned_as_it_is_configured_and_hold(lora):
    assert RESULT["changes"] == lora.CHANGES
    assert [run["seed"] for run in RESULT["runs"]] == [0, 1, 2]
    assert RESULT["verdict"] == lora.verdict(RESULT["runs"])
    assert RESULT["verdict"]["ok"]
    assert {run["greedy"]["items"] for run in RESULT["runs"]} == {512}
