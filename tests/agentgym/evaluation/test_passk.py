from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.evaluation.intervals import Interval, clustered_interval, curves


def pass_at_k(n, c, k):
    n, c = np.broadcast_arrays(np.atleast_1d(n), c)
    return np.squeeze(curves(n, c, k)[0][:, -1])


def test_pass_at_k_agrees_with_numbers_worked_out_on_paper() -> None:
    # n 4, c 1, k 2: of C(4,2) = 6 pairs C(3,2) = 3 hold no success, 1 - 3/6
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    # n 5, c 2, k 3: C(3,3) / C(5,3) = 1/10
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    # n 10, c 3, k 4: C(7,4) / C(10,4) = 35/210
    assert pass_at_k(10, 3, 4) == pytest.approx(1 - 35 / 210)


def test_pass_at_k_is_not_the_plug_in_formula() -> None:
    # 1 - (1 - 1/4)^2 = 0.4375 draws with replacement and is biased
    assert abs(pass_at_k(4, 1, 2) - (1 - (1 - 1 / 4) ** 2)) > 0.06


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
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets)
    )


def wilson_interval(successes, n):
    values = np.repeat([1.0, 0.0], [successes, n - successes])
    return clustered_interval(values, kind="share", confidence=0.95)


def test_wilson_agrees_with_known_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3: 81/263 and 15/148
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        interval = wilson_interval(successes, n)
        assert interval.mean == successes / n
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_has_width_where_all_succeed_and_stays_in_0_to_1() -> None:
    interval = wilson_interval(20, 20)
    assert interval.high == interval.mean == 1.0
    assert interval.low == pytest.approx(1 - 0.1611, abs=5e-5)
    with pytest.raises(ValueError, match="at least one item"):
        wilson_interval(0, 0)


def test_an_interval_survives_json() -> None:
    interval = wilson_interval(3, 4)
    assert Interval(**json.loads(json.dumps(interval.to_json()))) == interval
