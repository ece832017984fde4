"""The default task reaches the same success through vLLM as through the built-in engine."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/engines.json").read_text())


engines = imported("engines")


def seed(low, mean, high):
    return {"sampled": {"low": low, "mean": mean, "high": high}}


@pytest.mark.parametrize(("reached", "holds"), [(0.92, True), (0.99, False), (0.85, False)])
def test_every_seed_must_lie_within_what_the_built_in_engine_reaches(engines, reached, holds):
    learned = {
        "torch 0": seed(0.90, 0.93, 0.95),
        "torch 1": seed(0.91, 0.94, 0.97),
        "vllm 0": seed(0.0, 0.95, 1.0),
        "vllm 1": seed(0.0, reached, 1.0),
    }
    found = engines.verdict(learned, [0, 1])
    assert found["ok"] == holds
    assert found["interval"] == [90.0, 97.0]


def test_three_seeds_were_learned_through_both_and_hold(engines):
    assert RESULT["verdict"] == engines.verdict(RESULT["learned"], [0, 1, 2])
    assert RESULT["verdict"]["ok"]
    assert RESULT["throughput"]["vllm_over_torch"] > 0
