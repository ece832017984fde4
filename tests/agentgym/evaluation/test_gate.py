"""Tests for the gate's decision: promote, hold (with the number of items needed), or reject."""

import json
from dataclasses import replace

import numpy as np
import pytest

from agentgym.config import GateConfig
from agentgym.evaluation.gate import Evidence, judge
from agentgym.evaluation.paired import Pair

RULES = GateConfig()


def pair(before, after, families=None):
    """Return a pair with one sample per item. before, after: [I] of 0, 1 or NaN."""
    before, after = (np.array(each, dtype=float)[:, None] for each in (before, after))
    names = tuple(f"babyai_{row}" for row in range(len(before)))
    return Pair(names, tuple(families or [None] * len(before)), before, after)


def solved(won, lost, both, neither):
    """Return a pair by counts of items: candidate only, champion only, both and neither succeed."""
    before = [0] * won + [1] * lost + [1] * both + [0] * neither
    after = [1] * won + [0] * lost + [1] * both + [0] * neither
    return pair(before, after)


def evidence(*pairs, **rest):
    names = ("babyai", "textcraft", "sciworld")
    return Evidence(dict(zip(names, pairs, strict=False)), True, **rest)


def ruling(found, rule):
    (one,) = [each for each in found.rulings if each.rule == rule]
    return one


def first(successes, num_items, **rest):
    after = [1] * successes + [0] * (num_items - successes)
    return Evidence({"babyai": pair([np.nan] * num_items, after)}, False, **rest)


def test_a_better_model_is_promoted_and_the_gain_is_the_reason():
    found = judge(RULES, evidence(solved(60, 20, 200, 120)))
    assert found.verdict == "PROMOTE"
    # 40 of 400 items; sd of a difference sqrt((80 - 400 * 0.01) / 399) = 0.4364, t 1.649
    assert ruling(found, "gain").numbers["gain"] == pytest.approx(0.1)
    assert ruling(found, "gain").numbers["low"] == pytest.approx(
        0.1 - 1.649 * 0.4364 / 20, abs=2e-4
    )
    assert found.why == "+10.0 points [+6.4, +13.6] over the champion"


def test_a_worse_model_is_rejected():
    found = judge(RULES, evidence(solved(20, 60, 200, 120)))
    assert (found.verdict, found.needed_items) == ("REJECT", None)
    assert "it is worse" in found.why


def test_an_equal_model_is_rejected_where_a_gain_would_have_been_shown():
    found = judge(RULES, evidence(solved(20, 20, 900, 60)))
    assert found.verdict == "REJECT"
    assert "would have been shown" in found.why


def test_too_few_items_hold_an_equal_model_and_say_how_many_would_do():
    found = judge(RULES, evidence(solved(20, 20, 40, 20)))
    assert found.verdict == "HOLD"
    detectable = ruling(found, "gain").numbers["detectable"]
    # sd sqrt(40 / 99) = 0.6356; (1.6604 + 0.8453) * 0.06356
    assert detectable == pytest.approx(0.1593, abs=2e-4)
    assert found.needed_items == int(np.ceil(100 * (detectable / 0.05) ** 2))
    assert str(found.needed_items) in found.why


def test_a_handful_of_items_promotes_nobody_however_clear_they_are():
    found = judge(RULES, evidence(solved(49, 0, 0, 0)))
    assert (found.verdict, found.needed_items) == ("HOLD", 50)
    assert judge(RULES, evidence(solved(50, 0, 0, 0))).verdict == "PROMOTE"


def test_single_episodes_are_judged_by_the_exact_test_as_well():
    """Apply the exact test: 5 wins of 5 differences have p = 1/32, 4 of 4 have 1/16."""
    rules = GateConfig(worth=0.5)
    five, four = (judge(rules, evidence(solved(n, 0, 60, 0))) for n in (5, 4))
    assert ruling(five, "gain").numbers["p"] == pytest.approx(1 / 32)
    assert ruling(four, "gain").numbers["p"] == pytest.approx(1 / 16)
    assert four.verdict != "PROMOTE"


def test_the_first_champion_needs_its_floor_only():
    assert judge(GateConfig(min_success=0.0), first(0, 12)).verdict == "PROMOTE"
    assert judge(RULES, first(2, 12)).verdict == "REJECT"
    floor = GateConfig(min_success=0.5)
    low, unsure, high = (judge(floor, first(n, 40)) for n in (10, 22, 35))
    assert [each.verdict for each in (low, unsure, high)] == ["REJECT", "HOLD", "PROMOTE"]
    assert unsure.needed_items > 40
    assert high.why == "the first model of this name"


def test_the_floor_holds_for_later_champions_too():
    rules = GateConfig(min_success=0.9)
    assert judge(rules, evidence(solved(60, 20, 200, 120))).verdict == "REJECT"


@pytest.mark.parametrize("coverage", [(0.9, 1.0), (1.0, 0.9)])
def test_failing_environments_hold_it_whoever_they_failed(coverage):
    found = judge(RULES, evidence(solved(60, 20, 200, 120), coverage=coverage))
    assert found.verdict == "HOLD"
    assert "90.0%" in found.why


def test_another_question_holds_it_and_nothing_else_is_judged():
    found = judge(RULES, evidence(solved(60, 20, 200, 120), obstacle="items: 400 and 200"))
    assert found.verdict == "HOLD"
    assert "items: 400 and 200" in found.why
    assert not [each for each in found.rulings if each.rule == "gain"]


@pytest.mark.parametrize(
    ("known", "verdict", "rule"),
    [
        ({"audit": "failed", "audit_note": "numbers: step-1"}, "REJECT", "audit"),
        ({"drift": "moved by hand"}, "HOLD", "alias"),
        ({"num_seen": 3}, "HOLD", "unseen items"),
        ({"num_looks": 20}, "HOLD", "looks"),
        ({"tokens": (210.0, 100.0)}, "REJECT", "length"),
    ],
)
def test_what_forbids_the_promotion_of_a_better_model(known, verdict, rule):
    found = judge(RULES, evidence(solved(60, 20, 200, 120), **known))
    assert (found.verdict, ruling(found, rule).verdict) == (verdict, verdict)
    assert ruling(found, "gain").verdict == "PROMOTE"


def test_a_failed_audit_bars_a_first_champion_and_an_asked_for_one_is_waited_for():
    assert judge(RULES, first(30, 40, audit="failed")).verdict == "REJECT"
    asked = GateConfig(require_audit=True)
    assert judge(asked, first(30, 40)).verdict == "HOLD"
    assert judge(asked, first(30, 40, audit="passed")).verdict == "PROMOTE"


@pytest.mark.parametrize(("kl", "verdict"), [(None, "HOLD"), (0.2, "REJECT"), (0.05, "PROMOTE")])
def test_the_distance_from_the_reference_is_a_rail(kl, verdict):
    rules = GateConfig(max_reference_kl=0.1)
    found = judge(rules, evidence(solved(60, 20, 200, 120), reference_kl=kl))
    assert found.verdict == verdict


def test_an_environment_may_not_lose_more_than_its_margin():
    gains = solved(120, 20, 200, 60)
    loses = solved(20, 120, 200, 60)
    found = judge(RULES, evidence(gains, loses))
    assert found.verdict == "REJECT"
    assert "textcraft" in found.why
    # a loss of 4 points of 400, bound 7.0: within a margin of 10, inconclusive for a margin of 5
    slight = solved(25, 41, 250, 84)
    assert judge(RULES, evidence(gains, slight)).verdict == "HOLD"
    assert (
        judge(GateConfig(margins={"textcraft": 0.1}), evidence(gains, slight)).verdict == "PROMOTE"
    )


def test_a_family_that_is_shown_to_collapse_forbids_it_and_a_small_one_does_not():
    before, after = [0] * 100 + [1] * 200, [1] * 100 + [1] * 170 + [0] * 30
    families = ["a"] * 100 + ["b"] * 140 + ["c"] * 60
    found = judge(RULES, evidence(pair(before, after, families)))
    assert found.verdict == "REJECT"
    assert "babyai, c: -50.0 points" in found.why
    after[-30:] = [1] * 30
    after[-1] = 0  # one item of a family
    assert judge(RULES, evidence(pair(before, after, families))).verdict == "PROMOTE"


def test_evidence_is_the_same_after_it_was_written_down():
    table = pair([1, 0, np.nan, 0], [1, 1, 0, np.nan], ["a", None, "b", "a"])
    known = evidence(table, coverage=(0.9, 1.0), tokens=(3.0, None), num_looks=2)
    again = Evidence.from_json(json.loads(json.dumps(known.to_json())))
    np.testing.assert_array_equal(again.pairs["babyai"].after, table.after)
    assert again.pairs["babyai"].families == table.families
    assert replace(again, pairs={}) == replace(known, pairs={})
    assert again.item_set == known.item_set
