"""Paired comparison of two results; results of different questions are refused."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm, ttest_rel

from agentgym.evaluation.paired import (
    Incomparable,
    Pair,
    align,
    compare,
    decide,
    detectable_difference,
    holm,
    mcnemar_exact,
    moments,
)
from agentgym.evaluation.result import Outcome, Result, Slot

NAN = float("nan")
IDENTITY = {"policy": "a", "protocol": {"envs": [{"max_turns": 12}]}, "prompts": {"babyai": "go"}}


def pair(before, after, families=None):
    before, after = (np.array(each, dtype=float) for each in (before, after))
    names = tuple(f"babyai_{row}" for row in range(len(before)))
    return Pair(names, tuple(families or [None] * len(before)), before, after)


def result(successes, **changed):
    """Return a result. successes: [items][samples], None for a failed episode."""
    slots = tuple(
        Slot(
            "babyai",
            f"babyai_{item}",
            sample,
            outcome=Outcome.ENV_ERROR if success is None else Outcome.SCORED,
            success=bool(success),
            family=f"level {item}",
        )
        for item, row in enumerate(successes)
        for sample, success in enumerate(row, start=1)
    )
    return Result(IDENTITY | changed, slots)


def test_one_sample_per_item_is_tested_exactly():
    # 1 loss and 8 wins: 2 * (1 + 9) / 2^9
    before = [[1.0]] + [[0.0]] * 8 + [[1.0]] * 20
    after = [[0.0]] + [[1.0]] * 8 + [[1.0]] * 20
    found = decide(pair(before, after), confidence=0.95)
    assert found.test == "mcnemar_exact"
    assert found.p_value == pytest.approx(20 / 512)
    assert (len(found.wins), found.losses, found.num_ties) == (8, ("babyai_0",), 20)
    assert found.difference.mean == pytest.approx(7 / 29)
    assert mcnemar_exact(np.zeros(5)) == 1.0


def test_more_samples_are_students_paired_t_over_items():
    generator = np.random.default_rng(3)
    before = generator.integers(0, 2, (60, 4)).astype(float)
    after = generator.integers(0, 2, (60, 4)).astype(float)
    found = decide(pair(before, after), confidence=0.95)
    known = ttest_rel(after.mean(axis=1), before.mean(axis=1))
    assert found.test == "clustered_t"
    # few items determine the variance: slightly fewer degrees of freedom
    assert found.p_value == pytest.approx(known.pvalue, abs=0.002)
    assert found.difference.low == pytest.approx(known.confidence_interval().low, abs=0.002)


def test_families_are_the_clusters_and_make_it_less_sure():
    families = [f"f{row // 10}" for row in range(60)]
    generator = np.random.default_rng(4)
    shift = np.repeat(generator.normal(0.1, 0.25, 6), 10)[:, None]
    before = (generator.random((60, 8)) < 0.4).astype(float)
    after = (generator.random((60, 8)) < 0.4 + shift).astype(float)
    with_families = decide(pair(before, after, families), confidence=0.95)
    without = decide(pair(before, after), confidence=0.95)
    assert (with_families.clusters, with_families.num_clusters) == ("families", 6)
    assert with_families.p_value > 5 * without.p_value
    assert with_families.detectable > 1.5 * without.detectable
    assert len(with_families.by_family) == 6


def test_a_policy_beside_itself_shows_nothing_and_says_what_it_could_have_shown():
    values = np.random.default_rng(5).integers(0, 2, (100, 1)).astype(float)
    found = compare({"babyai": pair(values, values)}, confidence=0.95)["babyai"]
    assert (found.verdict, found.p_value, found.num_ties) == ("not shown", 1.0, 100)
    assert (found.wins, found.losses, found.needed_items) == ((), (), None)
    assert 0.02 < found.detectable < 0.06


def test_what_is_detectable_follows_the_textbook():
    values = np.tile([0.5, -0.5], 500)[None]
    found = detectable_difference(moments(values, kind="number"), 0.95)
    assert found.item() == pytest.approx((norm.ppf(0.975) + norm.ppf(0.8)) * 0.5 / 1000**0.5, 0.01)


def test_the_items_that_would_show_a_difference_grow_with_its_inverse_square():
    before = np.zeros((100, 2))
    after = before.copy()
    after[:4, 0] = 1
    found = decide(pair(before, after), confidence=0.95)
    assert found.needed_items == pytest.approx(100 * (found.detectable / 0.02) ** 2, abs=1)


def test_holm_multiplies_the_smallest_most():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_two_environments_need_stronger_evidence_than_one():
    # 6 wins, no loss: p = 2 / 2^6 = .031, and .0625 of two
    one = pair([[0.0]] * 20, [[1.0]] * 6 + [[0.0]] * 14)
    same = pair([[0.0]] * 20, [[0.0]] * 20)
    assert compare({"a": one}, confidence=0.95)["a"].verdict == "better"
    both = compare({"a": one, "b": same}, confidence=0.95)
    assert (both["a"].verdict, both["a"].p_adjusted) == ("not shown", pytest.approx(0.0625))
    back = pair([[1.0]] * 6 + [[0.0]] * 14, [[0.0]] * 20)
    assert compare({"a": back}, confidence=0.95)["a"].verdict == "worse"


def test_results_are_aligned_by_item_and_sample_and_failures_leave_both():
    found = align(result([[1, 0], [None, 1]]), result([[1, 1], [1, 0]], policy="b"))["babyai"]
    assert found.items == ("babyai_0", "babyai_1")
    assert found.families == ("level 0", "level 1")
    decision = decide(found, confidence=0.95)
    assert (decision.wins, decision.losses) == (("babyai_0",), ("babyai_1",))
    assert decision.before == pytest.approx(0.75)  # babyai_1 counts its second sample only


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prompts": {"babyai": "run"}}, r'prompts\.babyai: "go" and "run"'),
        ({"protocol": {"envs": [{"max_turns": 20}]}}, r"protocol\.envs\[0\]\.max_turns: 12 and 20"),
        ({"versions": {"babyai": "2"}}, 'versions.*"2"'),
    ],
)
def test_results_of_two_questions_are_refused_with_what_differs(changed, told):
    with pytest.raises(Incomparable, match=told):
        align(result([[1]]), result([[1]], **changed))


def test_slots_that_differ_and_results_that_are_not_finished_are_refused():
    with pytest.raises(Incomparable, match="babyai_1 sample 1"):
        align(result([[1]]), result([[1], [0]]))
    whole = result([[1], [0]])
    part = replace(whole, slots=(whole.slots[0], replace(whole.slots[1], outcome=None)))
    with pytest.raises(Incomparable, match="second result is not finished: 1 of 2"):
        align(whole, part)
    failed = pair([[NAN]], [[1.0]])
    with pytest.raises(ValueError, match="counts in both"):
        decide(failed, confidence=0.95)
