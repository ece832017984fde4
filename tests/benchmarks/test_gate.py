"""The gate seldom promotes a model that is no better, and what was measured of it is committed."""

import json
import re
from pathlib import Path

import numpy as np

from agentgym.config import load_config
from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/gate.json").read_text())


gate = imported("gate")


def test_equal_models_are_seldom_promoted_and_better_ones_are(gate):
    """A reduced twin of `make measure NAME=gate`."""
    rules, generator = (
        load_config(ROOT / "params.yaml").gate,
        np.random.Generator(np.random.Philox(7)),
    )
    equal = gate.simulate(rules, gate.Case(200, 4, 0, 0.0), 300, generator)
    better = gate.simulate(rules, gate.Case(200, 4, 0, 0.1), 60, generator)
    assert equal["PROMOTE"] < 0.09  # three standard errors over 5 %
    assert better["PROMOTE"] > 0.9


def test_the_committed_simulations_hold_what_is_asked(gate):
    assert RESULT["simulations"] >= 5000
    assert RESULT["rules"] == load_config(ROOT / "params.yaml").gate.semantic()
    assert RESULT["highest_upper"] <= gate.MOST_FALSE
    worse = [each for each in RESULT["cases"] if each["gain"] < 0]
    assert all(each["PROMOTE"] <= 0.01 for each in worse)


def test_the_manual_states_what_was_measured():
    text = " ".join((ROOT / "docs/operations.md").read_text().split())
    said = re.search(
        r"promotes ([\d.]+) % of equal models \(upper bound ([\d.]+) %; of any of five designs"
        r" ([\d.]+) %, upper bound ([\d.]+) %\) and ([\d.]+) % of those that are 5 points better",
        text,
    )
    assert said is not None
    better = next(
        each
        for each in RESULT["cases"]
        if (each["items"], each["samples"], each["families"], each["gain"]) == (512, 4, 0, 0.05)
    )
    shares = (
        *(RESULT["false_promotions"], RESULT["false_promotions_upper"]),
        *(RESULT["highest"], RESULT["highest_upper"], better["PROMOTE"]),
    )
    assert said.groups() == tuple(f"{100 * share:.1f}" for share in shares)
    looks = re.search(r"at least one of twenty equal ones .* in ([\d.]+) % of the sets", text)
    assert looks is not None
    assert looks[1] == f"{100 * RESULT['looks']:.0f}"
