"""Advantages against numbers worked out on paper."""

import pytest
import torch

from agentgym.algorithms.advantages import grpo_advantages


def test_grpo_standardises_within_each_group_with_the_sample_deviation():
    # group 0: 1, 0, 0 -> mean 1/3, centred 2/3, -1/3, -1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735
    # group 1: 2, 4    -> mean 3,   centred -1, 1,            variance (1 + 1) / 1 = 2,           std 1.41421
    returns, groups = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0]), torch.tensor([0, 1, 0, 1, 0])
    expected = torch.tensor([1.154701, -0.707107, -0.577350, 0.707107, -0.577350])
    assert torch.allclose(grpo_advantages(returns, groups, eps=0.0), expected, atol=1e-5)
    # negative control: the population deviation of group 1 is 1
    assert not torch.allclose(grpo_advantages(returns, groups, eps=0.0)[1], torch.tensor(-1.0), atol=0.1)


def test_eps_is_added_to_the_deviation():
    # centred -1, 1 over sqrt(2) + 0.5
    assert grpo_advantages(torch.tensor([2.0, 4.0]), torch.tensor([0, 0]), eps=0.5).tolist() == pytest.approx(
        [-0.522408, 0.522408], abs=1e-5
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_of_equal_returns_gets_exact_zeros(value):
    # 0.1 summed seven times is not 0.7 in float32; a rounding error over eps must not become an advantage
    assert grpo_advantages(torch.full((7,), value), torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_a_group_left_with_one_member_gets_zero_and_disturbs_no_other():
    advantages = grpo_advantages(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([0, 1, 1]), eps=0.0)
    assert advantages.tolist() == pytest.approx([0.0, 0.707107, -0.707107], abs=1e-5)


def test_the_order_of_the_rows_does_not_matter():
    returns, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    order = torch.tensor([5, 2, 0, 3, 1, 4])
    assert torch.allclose(grpo_advantages(returns, groups)[order], grpo_advantages(returns[order], groups[order]))
