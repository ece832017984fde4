"""Estimates against closed forms worked out by hand, and against worlds whose truth is known."""

from math import comb

import numpy as np
import pytest
from scipy.stats import t as student

from agentgym.evaluation.intervals import curves
from agentgym.evaluation.numbers import (
    by_family,
    item_means,
    mean_reward,
    per_item,
    ratio,
    success,
    to_success,
)
from tests.agentgym.evaluation.outcomes import NAN, wilson


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
    # five families of ten items, all alike within: t with 4 degrees of freedom of five means
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
    turns[0, 0] = NAN  # an endpoint that does not tell its tokens: unknown, not 0
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
