"""Losses and their bookkeeping against numbers worked out on paper."""

import math

import pytest
import torch

from agentgym.algorithms.losses import aggregation_weights, clip_loss, importance_weights, mismatch


def loss_and_gradient(ratio, advantage, **bounds):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clip_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), **(bounds or {"clip_low": 0.2, "clip_high": 0.28}))
    loss.sum().backward()
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # inside: -rho A, and d(rho)/d(log p) = rho
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # above 1.28: capped for a positive advantage, not for a negative one
        (1.5, 2.0, -2.56, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        # below 0.8: capped for a negative advantage, not for a positive one
        (0.5, -2.0, 1.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_the_clip_binds_only_where_the_policy_has_already_gone_far_enough(ratio, advantage, loss, gradient):
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


def test_the_two_bounds_are_separate():
    # 1.5 lies inside [0.9, 1.6]; 0.85 does not: max side -A * 0.9
    assert loss_and_gradient(1.5, 1.0, clip_low=0.1, clip_high=0.6) == pytest.approx((-1.5, -1.5), abs=1e-5)
    assert loss_and_gradient(0.85, -1.0, clip_low=0.1, clip_high=0.6) == pytest.approx((0.9, 0.0), abs=1e-5)


def test_token_aggregation_counts_every_token_the_same():
    assert aggregation_weights(torch.tensor([0, 0, 0, 2]), 3, "token").tolist() == [0.25] * 4


def test_sequence_aggregation_counts_every_row_with_actions_the_same():
    # two rows have action tokens: 3 tokens share 1/2, one token has 1/2; row 1 has none
    assert aggregation_weights(torch.tensor([0, 0, 0, 2]), 3, "sequence").tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_weighted_sum_does_not_depend_on_the_split_into_micro_batches(aggregation):
    rows, losses = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1.0, 5.0, 3.0, 8.0, 2.0, 4.0])
    weights = aggregation_weights(rows, 3, aggregation)
    whole = {"token": 23 / 6, "sequence": (3 + 8 + 3) / 3}[aggregation]
    assert float((losses * weights).sum()) == pytest.approx(whole)
    assert sum(float((losses * weights)[rows == row].sum()) for row in range(3)) == pytest.approx(whole)
    # negative control: the mean of micro-batch means is another number
    assert sum(float(losses[part].mean()) for part in ([0, 1, 2, 3], [4, 5])) / 2 != pytest.approx(whole)


def test_importance_weights_are_capped_from_above_alone():
    learner, engine = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.5, -3.0, -1.0])
    # exp(0.5) = 1.64872, exp(2) capped, exp(-2) = 0.13534
    assert importance_weights(learner, engine, 2.0).tolist() == pytest.approx([1.64872, 2.0, 0.13534], abs=1e-4)


def test_mismatch_of_equal_policies_is_nothing():
    assert mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0])) == {"kl": 0.0, "max_abs": 0.0, "ess": 1.0}


def test_mismatch_against_hand_values():
    # w = 2 and 0.5: kl = ((2 - 1 - ln 2) + (0.5 - 1 + ln 2)) / 2 = 0.25; ess = 2.5^2 / (2 * 4.25) = 0.735294
    gap = mismatch(torch.tensor([math.log(2.0), -math.log(2.0)]), torch.zeros(2))
    assert gap["kl"] == pytest.approx(0.25, abs=1e-6)
    assert gap["max_abs"] == pytest.approx(math.log(2), abs=1e-6)
    assert gap["ess"] == pytest.approx(0.735294, abs=1e-6)


def test_mismatch_is_measured_from_the_engine_and_never_negative():
    """E_engine[k3] = KL(engine || learner); with engine (0.8, 0.2) and learner (0.5, 0.5): 0.8 ln 1.6 + 0.2 ln 0.4 = 0.192745."""
    engine, learner = torch.tensor([0.8] * 4 + [0.2]).log(), torch.tensor([0.5] * 5).log()
    assert mismatch(learner, engine)["kl"] == pytest.approx(0.192745, abs=1e-5)
    assert mismatch(engine, learner)["kl"] != pytest.approx(0.192745, abs=1e-2)
    assert mismatch(torch.tensor([-5.0]), torch.tensor([-0.1]))["kl"] > 0


def test_a_log_probability_that_is_not_a_number_stays_visible():
    assert math.isnan(mismatch(torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, -1.0]))["kl"])
