"""Numbers of an evaluation, hand-computed from a few slots; estimates against closed forms."""

import json
from math import comb

import numpy as np
import pytest
from scipy.stats import t as student

from agentgym.evaluation.intervals import FAILED, curves
from agentgym.evaluation.numbers import (
    by_family,
    item_means,
    ks,
    mean_reward,
    numbers_of,
    per_item,
    ratio,
    success,
    to_success,
)
from agentgym.evaluation.protocol import protocol_from
from agentgym.evaluation.result import Attempt, Outcome, Slot
from agentgym.types import Usage
from tests.agentgym.evaluation.outcomes import NAN, wilson

PROTOCOL = protocol_from({"envs": [{"env": {"name": "searchqa"}}]}, {})


def slot(item, sample, success, *, outcome=Outcome.SCORED, turns=4, family="nq", **fields):
    return Slot(
        "searchqa",
        f"searchqa_{item}",
        sample,
        outcome=outcome,
        success=success,
        reward=float(success) if outcome.counts else None,
        num_turns=turns,
        family=family,
        **fields,
    )


def numbers(slots):
    found = numbers_of(slots, PROTOCOL)["searchqa"]
    json.dumps(found, allow_nan=False)  # undefined is null, never NaN
    return found


def test_every_k_has_its_estimate_and_a_failed_slot_leaves_k_above_the_rest():
    broken = slot(1, 2, False, outcome=Outcome.ENV_ERROR)
    found = numbers([slot(0, 1, True), slot(0, 2, False), slot(1, 1, True), broken])
    assert found["summary"]["avg_at_2"]["mean"] == 0.75
    assert [row["mean"] for row in found["curves"]["pass_at"]] == [0.75, 1.0]
    assert [row["mean"] for row in found["curves"]["pass_hat"]] == [0.75, 0.0]
    assert [row["num_items"] for row in found["curves"]["pass_hat"]] == [2, 1]
    assert found[FAILED]["avg_at_2"]["mean"] == 0.5
    assert "greedy" not in found["summary"]
    alone = numbers([slot(0, 1, True), slot(0, 2, True, outcome=Outcome.TIMEOUT)])
    assert alone["curves"]["pass_at"][1] is None
    assert "pass_at_2" not in alone["summary"]


def test_effort_is_told_of_successes_and_unknown_tokens_are_not_known():
    usage, untold = Usage(num_calls=1, output_tokens=30), Usage(num_calls=1, num_untold=1)
    slots = [
        slot(0, 1, True, turns=3, usage=usage, num_invalid=1),
        slot(1, 1, True, turns=5, usage=usage, num_invalid=0),
        slot(2, 1, False, turns=8, usage=untold, num_invalid=3),
    ]
    found = numbers(slots)
    assert (found["turns_to_success"]["mean"]["mean"], found["turns_to_success"]["median"]) == (
        4,
        4,
    )
    assert found["tokens_to_success"]["median"] == 30
    assert found["invalid_actions"]["mean"] == pytest.approx(4 / 16)
    assert found["success_within_turns"] == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, *[2 / 3] * 4], abs=1e-6
    )
    assert numbers([slot(0, 1, True, usage=untold)])["tokens_to_success"] is None
    assert numbers([slot(0, 1, False)])["invalid_actions"] is None


def test_families_are_clusters_from_five_on_and_each_has_its_success():
    few = [slot(item, 1, item % 2 == 0, family=f"set {item % 4}") for item in range(40)]
    many = [slot(item, 1, item % 5 < 2, family=f"set {item % 5}") for item in range(40)]
    assert numbers(few)["clusters"] == {"kind": "items", "num": 40}
    assert numbers(many)["clusters"] == {"kind": "families", "num": 5}
    narrow, wide = (numbers(each)["summary"]["avg_at_1"] for each in (few, many))
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])
    found = numbers(many)["by_family"]
    assert {name: row["success"]["mean"] for name, row in found.items()} == {
        "set 0": 1.0,
        "set 1": 1.0,
        "set 2": 0.0,
        "set 3": 0.0,
        "set 4": 0.0,
    }
    assert found["set 0"]["num_items"] == 8


def test_parts_are_averaged_over_the_episodes_that_were_judged_by_them():
    slots = [
        slot(0, 1, True, info={"parts": {"em": 1.0, "f1": 1.0}}),
        slot(1, 1, False, info={"parts": {"em": 0.0, "f1": 0.5}}),
        slot(2, 1, False, info={"parts": {"html": [1.0, 0.0], "string": {"exact_match": 1.0}}}),
        slot(3, 1, False, info={"parts": {"failed": "KeyError"}}),
        slot(4, 1, False),
    ]
    assert {name: tuple(row.values()) for name, row in numbers(slots)["parts"].items()} == {
        "em": (0.5, 2),
        "f1": (0.75, 2),
        "html": (0.0, 1),
        "string.exact_match": (1.0, 1),
    }


def test_nothing_played_says_nothing():
    found = numbers([Slot("searchqa", "searchqa_0", 1)])
    assert (found["summary"], found["curves"], found["reward"]) == ({}, {}, None)
    assert (ks(0), ks(1), ks(6)) == ((), (1,), (1, 2, 4, 6))


def test_slots_that_needed_another_attempt_are_set_beside_the_others():
    failed = (Attempt(Outcome.ENV_ERROR, "gone", 1, Usage()),)
    slots = [slot(item, 1, item >= 20, failed=failed if item < 10 else ()) for item in range(40)]
    found = numbers(slots)["retried"]
    assert (found["num"], found["success"], found["differs"]) == (10, 0.0, True)
    assert found["success_of_first_tries"] == pytest.approx(2 / 3)


def test_pass_at_k_and_pass_hat_k_equal_the_binomial_coefficients_for_every_k():
    n = 7
    c = np.arange(n + 1)
    at, hat = curves(np.full(n + 1, n), c, n)
    for k in range(1, n + 1):
        assert at[:, k - 1] == pytest.approx([1 - comb(n - x, k) / comb(n, k) for x in c])
        assert hat[:, k - 1] == pytest.approx([comb(x, k) / comb(n, k) for x in c])


def test_above_the_samples_there_is_no_estimate_and_never_a_number():
    at, hat = curves(np.array([2, 0, 3]), np.array([2, 0, 1]), 4)
    assert np.isnan(at).tolist() == np.isnan(hat).tolist()
    assert np.isnan(at).sum(axis=1).tolist() == [2, 4, 1]
    found = success(np.array([1.0, NAN]), np.array([[1, NAN], [0, NAN]]), confidence=0.95)
    assert (found["pass_at_2"], found["pass_hat_2"]) == (None, None)
    assert found["pass_at_1"].mean == found["avg_at_2"].mean == 0.5
    assert found["greedy"].num_items == 1


def test_both_are_unbiased():
    generator = np.random.default_rng(1)
    p = generator.beta(0.5, 1.5, size=4000)
    drawn = generator.binomial(8, p)
    at, hat = curves(np.full(len(p), 8), drawn, 8)
    for k in (1, 3, 8):
        for found, truth in ((at, 1 - (1 - p) ** k), (hat, p**k)):
            off = found[:, k - 1] - truth
            assert abs(off.mean()) < 4 * off.std() / np.sqrt(len(off))


def test_one_sample_per_item_gets_wilsons_interval():
    samples = np.array([[1.0]] * 7 + [[0.0]] * 13)
    found = success(samples[:, 0], samples, confidence=0.95)
    exact = wilson(7, 20)
    for name in ("greedy", "avg_at_1", "pass_at_1", "pass_hat_1"):
        got = found[name]
        assert (got.mean, got.low, got.high) == pytest.approx((exact.mean, exact.low, exact.high))


def test_an_interval_over_families_is_that_of_their_means():
    # five families of ten equal items: t with 4 degrees of freedom over five means
    means = np.array([0.2, 0.3, 0.5, 0.7, 0.8])
    rewards = np.repeat(means, 10)[:, None]
    families = np.repeat(list("abcde"), 10).tolist()
    found = mean_reward(rewards, families, confidence=0.95)
    half = student.ppf(0.975, 4) * means.std(ddof=1) / np.sqrt(5)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))
    alone = mean_reward(rewards, confidence=0.95)
    assert alone.high - alone.low < 0.4 * (found.high - found.low)


def test_families_show_success_of_their_own_items():
    samples = np.array([[1, 1], [1, 0], [0, 0], [NAN, NAN], [NAN, NAN]])
    found = by_family(samples, ["a", "a", "b", "c", None], confidence=0.95)
    assert [(name, row["num_items"]) for name, row in found.items()] == [
        ("a", 2),
        ("b", 1),
        ("c", 1),
    ]
    assert (found["a"]["success"].mean, found["b"]["success"].mean) == (0.75, 0.0)
    assert found["c"]["success"] is None


def test_what_a_success_takes_is_the_mean_over_successes():
    turns = np.array([[3, 9], [5, 7], [4, 2]], dtype=float)
    samples = np.array([[1, 0], [1, 1], [0, NAN]])
    found = to_success(turns, samples, confidence=0.95)
    assert (found["mean"].mean, found["median"], found["num_episodes"]) == (5.0, 5.0, 3)
    assert to_success(turns, np.zeros((3, 2)), confidence=0.95) is None
    turns[0, 0] = NAN  # an endpoint without token counts: unknown, not 0
    assert to_success(turns, samples, confidence=0.95) is None


def test_a_ratio_is_of_sums_and_its_interval_covers():
    assert ratio(np.zeros(3), np.zeros(3), confidence=0.95) is None
    assert ratio(np.array([1.0, 0]), np.array([2.0, 8]), confidence=0.95).mean == 0.1
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(500):
        whole = generator.integers(1, 20, 100).astype(float)
        chance = generator.beta(2, 6, 100)
        found = ratio(generator.binomial(whole.astype(int), chance), whole, confidence=0.95)
        hits += found.low <= 0.25 <= found.high
    assert 0.92 < hits / 500 < 0.98


def test_means_of_nothing_are_not_known():
    assert mean_reward(np.full((2, 2), NAN), confidence=0.95) is None
    assert item_means(np.array([[1, NAN], [NAN, NAN]])).tolist()[0] == 1.0
    with pytest.raises(ValueError, match="pass success, not score"):
        per_item(np.array([0.5]), np.array([[1.0]]))
    with pytest.raises(ValueError, match="greedy"):
        per_item(np.zeros(2), np.zeros((3, 1)))
