"""Two rewards are equal where they differ by no more than rounding, of one size and of another."""

import pytest
import torch

from agentgym.algorithms.signal import all_equal, differ


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.0, 1.0, True),
        (0.0, 1e-6, False),  # the tolerance at 0
        (0.0, 2e-6, True),
        (1.0, 1.0 + 2e-6, False),  # at 1 it is 3e-6
        (1.0, 1.0 + 4e-6, True),
        (1000.0, 1000.001, False),  # a float32 sum of a thousand rounds by more
        (-1.0, 1.0, True),
        (1.0, 0.0, False),  # high must be above low
    ],
)
def test_a_difference_is_more_than_the_rounding_of_what_is_compared(low, high, told):
    assert differ(low, high) == told
    assert bool(differ(torch.tensor(low).double(), torch.tensor(high).double())) == told


def test_a_group_carries_a_signal_where_its_extremes_differ():
    assert all_equal([0.5])
    assert all_equal([1.0, 1.0 + 1e-7, 1.0])
    assert not all_equal([1.0, 1.0, 0.0])
