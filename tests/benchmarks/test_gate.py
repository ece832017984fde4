"""The gate rarely promotes a model that is no better; the measured rates are committed."""

import json
from pathlib import Path

import numpy as np

from agentgym.config import load_config
from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/gate.json").read_text())


gate = imported("gate")


def test_equal_models_are_seldom_promoted_and_better_ones_are(gate):
    """Run a reduced version of `make measure NAME=gate`."""
    rules, generator = (
        load_config(ROOT / "params.yaml").gate,
        np.random.Generator(np.random.Philox(7)),
    )
    equal = gate.simulate(rules, gate.Case(200, 4, 0, 0.0), 300, generator)
    better = gate.simulate(rules, gate.Case(200, 4, 0, 0.1), 60, generator)
    assert equal["PROMOTE"] < 0.09  # three standard errors above 5 %
    assert better["PROMOTE"] > 0.9


def test_the_committed_simulations_hold_what_is_asked(gate):
    assert RESULT["simulations"] >= 5000
    assert RESULT["rules"] == load_config(ROOT / "params.yaml").gate.semantic()
    assert RESULT["highest_upper"] <= gate.MOST_FALSE
    worse = [each for each in RESULT["cases"] if each["gain"] < 0]
    assert all(each["PROMOTE"] <= 0.01 for each in worse)
