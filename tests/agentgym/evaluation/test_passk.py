from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.evaluation.passk import (
    Interval,
    bootstrap_interval,
    num_failed,
    paired_differences,
    pass_at_k,
    summarise,
    wilson_interval,
)

SETTINGS = {"confidence": 0.95, "num_bootstrap": 400, "seed": 3}
NAN = float("nan")


def test_pass_at_k_agrees_with_numbers_worked_out_on_paper() -> None:
    # n 4, c 1, k 2: of C(4,2) = 6 pairs C(3,2) = 3 hold no success, 1 - 3/6
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    # n 5, c 2, k 3: C(3,3) / C(5,3) = 1/10
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    # n 10, c 3, k 4: C(7,4) / C(10,4) = 35/210
    assert pass_at_k(10, 3, 4) == pytest.approx(1 - 35 / 210)


def test_pass_at_k_is_not_the_plug_in_formula() -> None:
    # 1 - (1 - 1/4)^2 = 0.4375 draws with replacement and is biased
    assert abs(float(pass_at_k(4, 1, 2)) - (1 - (1 - 1 / 4) ** 2)) > 0.06


def test_pass_at_k_is_vectorised_over_items() -> None:
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 2, 3, 4], 2), [0, 1 / 2, 5 / 6, 1, 1])
    np.testing.assert_allclose(pass_at_k([4, 3, 2], [1, 1, 0], 2), [1 / 2, 2 / 3, 0])


def test_pass_at_1_is_the_mean_and_pass_at_n_is_any() -> None:
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 2, 3, 4], 1), [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 2, 3, 4], 4), [0, 1, 1, 1, 1])


@settings(max_examples=60, deadline=None)
@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_all_k_subsets_with_a_success(
    outcomes: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(combinations(outcomes, k))
    assert float(pass_at_k(len(outcomes), sum(outcomes), k)) == pytest.approx(
        sum(map(any, subsets)) / len(subsets)
    )


def test_pass_at_k_refuses_what_is_undefined() -> None:
    with pytest.raises(ValueError, match=r"pass@4 needs at least 4 samples per item, got 3"):
        pass_at_k([4, 3], [1, 1], 4)
    with pytest.raises(ValueError, match="k >= 1"):
        pass_at_k(4, 1, 0)
    with pytest.raises(ValueError, match="0 <= successes <= samples"):
        pass_at_k(4, 5, 2)


def test_wilson_agrees_with_known_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3: 81/263 and 15/148
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        interval = wilson_interval(successes, n, 0.95)
        assert interval.mean == successes / n
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_has_width_where_all_succeed_and_stays_in_0_to_1() -> None:
    interval = wilson_interval(20, 20, 0.95)
    assert interval.high == interval.mean == 1.0
    assert interval.low == pytest.approx(1 - 0.1611, abs=5e-5)
    with pytest.raises(ValueError, match="got 0 of 0"):
        wilson_interval(0, 0, 0.95)


def test_the_bootstrap_of_two_items_has_the_quantiles_of_a_coin_pair() -> None:
    # means of two draws from {0, 1}: 0, 1/2, 1 with 1/4, 1/2, 1/4; the 95 % interval is all of it,
    # the 40 % interval is the middle
    assert bootstrap_interval(np.array([0.0, 1.0]), **SETTINGS) == Interval(0.5, 0.0, 1.0, 2)
    middle = bootstrap_interval(np.array([0.0, 1.0]), confidence=0.4, num_bootstrap=4000, seed=0)
    assert (middle.low, middle.high) == (0.5, 0.5)


def test_the_bootstrap_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        interval = bootstrap_interval(
            generator.beta(2, 3, size=80), confidence=0.9, num_bootstrap=300, seed=trial
        )
        covered += interval.low <= 0.4 <= interval.high
    assert 0.84 <= covered / 300 <= 0.95  # 0.9 less a little for 80 items; standard error 0.017


def test_the_bootstrap_repeats_with_its_seed_and_does_not_depend_on_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(1).random(101)
    whole = bootstrap_interval(values, **SETTINGS)
    assert bootstrap_interval(values, **SETTINGS) == whole
    assert bootstrap_interval(values, **{**SETTINGS, "seed": 4}) != whole
    monkeypatch.setattr("agentgym.evaluation.passk._CHUNK_DRAWS", 101 * 7)
    assert bootstrap_interval(values, **SETTINGS) == whole


def test_the_bootstrap_refuses_nan_and_nothing() -> None:
    for values in (np.array([]), np.array([1.0, NAN])):
        with pytest.raises(ValueError, match="drop failed items first"):
            bootstrap_interval(values, **SETTINGS)


def test_a_summary_has_the_numbers_worked_out_on_paper() -> None:
    greedy = np.array([1.0, 0.0, 1.0, 1.0])
    samples = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=float)
    summary = summarise(greedy, samples, k=(1, 2, 4), **SETTINGS)
    assert list(summary) == ["greedy", "avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4"]
    assert summary["greedy"] == wilson_interval(3, 4, 0.95)
    assert summary["avg_at_4"].mean == pytest.approx(7 / 16)
    assert summary["pass_at_1"].mean == pytest.approx(7 / 16)
    assert summary["pass_at_2"].mean == pytest.approx((1 / 2 + 0 + 5 / 6 + 1) / 4)
    assert summary["pass_at_4"].mean == pytest.approx(3 / 4)


def test_a_failed_environment_is_left_out_and_never_a_zero() -> None:
    greedy = np.array([1.0, NAN, 1.0])
    samples = np.array([[1, NAN, 1], [0, 1, 0], [NAN, NAN, NAN]])
    summary = summarise(greedy, samples, k=(2, 3), **SETTINGS)
    assert summary["greedy"] == wilson_interval(2, 2, 0.95)
    # a zero would give (2/3 + 1/3 + 0) / 3
    assert summary["avg_at_3"].mean == pytest.approx((1 + 1 / 3) / 2)
    assert summary["avg_at_3"].num_items == 2
    assert summary["pass_at_2"].mean == pytest.approx((1 + 2 / 3) / 2)
    assert summary["pass_at_3"].num_items == 1  # the first item has two valid samples left
    assert num_failed(greedy, samples) == 5


def test_an_evaluation_where_every_environment_failed_is_an_error() -> None:
    with pytest.raises(ValueError, match="greedy: no item has enough valid episodes"):
        summarise(np.array([NAN]), np.array([[1.0]]), k=(1,), **SETTINGS)


def test_a_score_that_is_not_a_success_is_refused() -> None:
    with pytest.raises(ValueError, match="samples must hold success as 1 or 0"):
        summarise(np.array([1.0]), np.array([[0.8, 1.0]]), k=(1,), **SETTINGS)
    with pytest.raises(ValueError, match=r"got \(2,\) and \(1, 2\)"):
        summarise(np.array([1.0, 0.0]), np.array([[0.0, 1.0]]), k=(1,), **SETTINGS)


def test_paired_differences_are_b_minus_a_item_by_item() -> None:
    a = (np.array([0.0, 1.0, 0.0]), np.array([[0, 0], [1, 0], [0, 0]], dtype=float))
    b = (np.array([1.0, 1.0, 0.0]), np.array([[1, 0], [1, 1], [0, 0]], dtype=float))
    gains = paired_differences(a, b, k=(1, 2), **SETTINGS)
    assert list(gains) == ["greedy", "avg_at_2", "pass_at_1", "pass_at_2"]
    assert gains["greedy"].mean == pytest.approx(1 / 3)
    assert gains["avg_at_2"].mean == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert gains["pass_at_2"].mean == pytest.approx(1 / 3)
    assert paired_differences(b, a, k=(1,), **SETTINGS)["greedy"].mean == pytest.approx(-1 / 3)


def test_pairing_is_narrower_than_two_intervals_where_items_differ_in_difficulty() -> None:
    generator = np.random.default_rng(2)
    difficulty = generator.random((200, 1))
    easy = (np.ones(200), (generator.random((200, 8)) < difficulty * 0.9).astype(float))
    hard = (np.ones(200), (generator.random((200, 8)) < difficulty * 0.8).astype(float))
    gain = paired_differences(hard, easy, k=(1,), **SETTINGS)["avg_at_8"]
    alone = summarise(*easy, k=(1,), **SETTINGS)["avg_at_8"]
    assert gain.high - gain.low < 0.7 * np.sqrt(2) * (alone.high - alone.low)
    assert gain.low <= 0.05 <= gain.high


def test_an_item_that_failed_in_either_evaluation_is_out_of_the_difference() -> None:
    a = (np.array([NAN, 0.0, 0.0]), np.array([[0.0], [NAN], [0.0]]))
    b = (np.array([1.0, NAN, 1.0]), np.array([[1.0], [1.0], [0.0]]))
    gains = paired_differences(a, b, k=(1,), **SETTINGS)
    assert (gains["greedy"].mean, gains["greedy"].num_items) == (1.0, 1)
    assert (gains["avg_at_1"].mean, gains["avg_at_1"].num_items) == (0.5, 2)


def test_evaluations_of_other_shapes_are_not_paired() -> None:
    a = (np.array([0.0]), np.array([[0.0]]))
    b = (np.array([0.0]), np.array([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="the same items and samples"):
        paired_differences(a, b, k=(1,), **SETTINGS)


def test_an_interval_survives_json() -> None:
    interval = wilson_interval(3, 4, 0.95)
    assert Interval(**json.loads(json.dumps(interval.to_json()))) == interval
