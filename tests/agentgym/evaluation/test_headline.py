"""Headline numbers of a run's evaluations compared with hand-computed values."""

import numpy as np
import pytest

from agentgym.evaluation.intervals import FAILED, Interval, clustered_interval
from agentgym.evaluation.numbers import headline, metrics_of, paired, success
from tests.agentgym.evaluation.outcomes import NAN, result_of, wilson


def summary(greedy, samples, k, families=None):
    found = headline(result_of(greedy, samples, families), k, 0.95)
    return {key: Interval(**row) for key, row in found["summary"].items()}


def bounds(interval):
    return interval.mean, interval.low, interval.high


def differences(a, b, k, families=None):
    before, after = (result_of(*outcomes, families) for outcomes in (a, b))
    return {key: Interval(**row) for key, row in paired(before, after, k, 0.95).items()}


def test_a_summary_has_the_numbers_worked_out_on_paper():
    greedy = np.array([1.0, 0.0, 1.0, 1.0])
    samples = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=float)
    found = summary(greedy, samples, k=(1, 2, 4))
    assert list(found) == ["greedy", "avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4"]
    assert bounds(found["greedy"]) == pytest.approx(bounds(wilson(3, 4)))
    assert found["avg_at_4"].mean == pytest.approx(7 / 16)
    assert found["pass_at_1"].mean == pytest.approx(7 / 16)
    assert found["pass_at_2"].mean == pytest.approx((1 / 2 + 0 + 5 / 6 + 1) / 4)
    assert found["pass_at_4"].mean == pytest.approx(3 / 4)


def test_a_failed_environment_is_left_out_and_never_a_zero():
    greedy = np.array([1.0, NAN, 1.0])
    samples = np.array([[1, NAN, 1], [0, 1, 0], [NAN, NAN, NAN]])
    found = summary(greedy, samples, k=(2, 3))
    assert bounds(found["greedy"]) == pytest.approx(bounds(wilson(2, 2)))
    # counting failures as 0 would give (2/3 + 1/3 + 0) / 3
    assert found["avg_at_3"].mean == pytest.approx((1 + 1 / 3) / 2)
    assert found["avg_at_3"].num_items == 2
    assert found["pass_at_2"].mean == pytest.approx((1 + 2 / 3) / 2)
    assert found["pass_at_3"].num_items == 1  # the first item has only two valid samples
    assert headline(result_of(greedy, samples), (2,), 0.95)["num_env_errors"] == 5


def test_an_evaluation_where_every_environment_failed_is_an_error():
    with pytest.raises(ValueError, match="greedy: no item has enough valid episodes"):
        summary(np.array([NAN]), np.array([[1.0]]), k=(1,))


def test_paired_differences_are_b_minus_a_item_by_item():
    a = (np.array([0.0, 1.0, 0.0]), np.array([[0, 0], [1, 0], [0, 0]], dtype=float))
    b = (np.array([1.0, 1.0, 0.0]), np.array([[1, 0], [1, 1], [0, 0]], dtype=float))
    gains = differences(a, b, k=(1, 2))
    assert list(gains) == ["greedy", "avg_at_2", "pass_at_1", "pass_at_2"]
    assert gains["greedy"].mean == pytest.approx(1 / 3)
    assert gains["avg_at_2"].mean == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert gains["pass_at_2"].mean == pytest.approx(1 / 3)
    assert differences(b, a, k=(1,))["greedy"].mean == pytest.approx(-1 / 3)


def test_pairing_is_narrower_than_two_intervals_where_items_differ_in_difficulty():
    generator = np.random.default_rng(2)
    difficulty = generator.random((200, 1))
    easy = (np.ones(200), (generator.random((200, 8)) < difficulty * 0.9).astype(float))
    hard = (np.ones(200), (generator.random((200, 8)) < difficulty * 0.8).astype(float))
    gain = differences(hard, easy, k=(1,))["avg_at_8"]
    alone = summary(*easy, k=(1,))["avg_at_8"]
    assert gain.high - gain.low < 0.7 * np.sqrt(2) * (alone.high - alone.low)
    assert gain.low <= 0.05 <= gain.high


def test_an_item_that_failed_in_either_evaluation_is_out_of_the_difference():
    a = (np.array([NAN, 0.0, 0.0]), np.array([[0.0], [NAN], [0.0]]))
    b = (np.array([1.0, NAN, 1.0]), np.array([[1.0], [1.0], [0.0]]))
    gains = differences(a, b, k=(1,))
    assert (gains["greedy"].mean, gains["greedy"].num_items) == (1.0, 1)
    assert (gains["avg_at_1"].mean, gains["avg_at_1"].num_items) == (0.5, 2)


def test_evaluations_of_other_shapes_are_not_paired():
    a = (np.array([0.0]), np.array([[0.0]]))
    b = (np.array([0.0]), np.array([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="the same items and samples"):
        differences(a, b, k=(1,))


def test_the_intervals_are_those_of_every_evaluation_and_families_are_its_clusters():
    generator = np.random.default_rng(0)
    families = [f"f{item % 6}" for item in range(60)]
    ease = np.repeat(generator.random(6), 10).reshape(6, 10).T.ravel()
    greedy = (generator.random(60) < ease).astype(float)
    samples = (generator.random((60, 4)) < ease[:, None]).astype(float)
    alone, told = summary(greedy, samples, (4,)), summary(greedy, samples, (4,), families)
    theirs = success(greedy, samples, families, confidence=0.95)
    assert told == {key: theirs[key] for key in ("greedy", "avg_at_4", "pass_at_4")}
    assert [each.mean for each in told.values()] == [each.mean for each in alone.values()]
    assert told["avg_at_4"].high - told["avg_at_4"].low > 1.2 * (
        alone["avg_at_4"].high - alone["avg_at_4"].low
    )
    before = np.zeros(60), np.zeros((60, 4))
    gain = differences(before, (greedy, samples), (4,), families)["avg_at_4"]
    gained = samples.mean(axis=1)
    assert gain == clustered_interval(gained, families, kind="difference", confidence=0.95)


def scored(greedy, envs=None):
    greedy = np.array(greedy)
    return headline(result_of(greedy, greedy[:, None], envs=envs), (1,), 0.95)


def test_failed_episodes_are_failures_in_the_other_convention():
    found = scored([1.0, NAN, 1.0, 0.0])
    assert found["summary"]["greedy"]["mean"] == pytest.approx(2 / 3)
    assert found[FAILED]["greedy"]["mean"] == 0.5
    assert found["coverage"] == 0.75


def test_both_conventions_are_reported_with_the_share_that_counts():
    """Let nine of 100 items time out: 50 % of all items succeed, 55 % of the finished ones."""
    found = scored([1.0] * 50 + [0.0] * 41 + [NAN] * 9)
    assert found["summary"]["greedy"]["mean"] == pytest.approx(50 / 91)
    assert found[FAILED]["greedy"]["mean"] == found[FAILED]["avg_at_1"]["mean"] == 0.5
    assert found[FAILED]["greedy"]["num_items"] == 100
    assert found["coverage"] == pytest.approx(0.91)
    whole = scored([1.0] * 50 + [0.0] * 50)
    assert (whole["coverage"], whole[FAILED]) == (1.0, whole["summary"])


def test_each_environment_has_its_own_coverage():
    found = scored([1.0, NAN, 1.0, 0.0], ["babyai", "babyai", "textcraft", "textcraft"])
    assert {env: own["coverage"] for env, own in found["by_env"].items()} == {
        "babyai": 0.5,
        "textcraft": 1.0,
    }
    assert found["by_env"]["babyai"][FAILED]["greedy"]["mean"] == 0.5


def test_families_of_two_environments_are_not_one_cluster():
    envs = ["babyai"] * 6 + ["textcraft"] * 6
    outcomes = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0] * 2)
    same = result_of(outcomes, outcomes[:, None], ["a", "b", "c"] * 4, envs)
    apart = result_of(outcomes, outcomes[:, None], ["a", "b", "c"] * 2 + ["d", "e", "f"] * 2, envs)
    assert headline(same, (1,), 0.95) == headline(apart, (1,), 0.95)


def test_metrics_tell_both_conventions():
    greedy = np.array([1.0, 0.0, 1.0, NAN])
    result = result_of(greedy, greedy[:, None])
    metrics = metrics_of(headline(result, (1,), 0.95), result)
    assert metrics["eval/greedy"] == pytest.approx(2 / 3)
    assert metrics[f"eval/{FAILED}/greedy"] == 0.5
    assert metrics["eval/coverage"] == 0.75
    assert metrics["eval/env_error_frac"] == 0.25
    assert metrics["eval/turns_mean"] == 3.0
