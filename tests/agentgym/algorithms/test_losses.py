"""Losses and their metrics compared with hand-computed values."""

import math
from types import SimpleNamespace

import pytest
import torch

from agentgym.algorithms.losses import (
    Actions,
    aggregation_weights,
    cispo,
    clipped,
    corrections,
    gspo,
    kl_penalty,
    mismatch,
    preference_loss,
    value_loss,
)


def loss_and_gradient(ratio, advantage, **bounds):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    actions = Actions(
        logprobs, torch.zeros(1), torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64)
    )
    loss, _ = clipped(actions, **(bounds or {"clip_low": 0.2, "clip_high": 0.28}))
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
def test_the_clip_binds_only_where_the_policy_has_already_gone_far_enough(
    ratio, advantage, loss, gradient
):
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


def test_the_two_bounds_are_separate():
    # 1.5 lies inside [0.9, 1.6]; 0.85 does not: max side -A * 0.9
    assert loss_and_gradient(1.5, 1.0, clip_low=0.1, clip_high=0.6) == pytest.approx(
        (-1.5, -1.5), abs=1e-5
    )
    assert loss_and_gradient(0.85, -1.0, clip_low=0.1, clip_high=0.6) == pytest.approx(
        (0.9, 0.0), abs=1e-5
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # 10 without the second clip, -3 A with it, and no gradient
        (2.0, -2.0, 4.0, 4.0),  # smaller ratios are unaffected
        (0.5, -2.0, 1.6, 0.0),  # as are small ratios with a negative advantage
        (5.0, 2.0, -2.56, 0.0),  # and positive advantages
    ],
)
def test_dual_clip_bounds_the_loss_of_a_negative_advantage(ratio, advantage, loss, gradient):
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert loss_and_gradient(ratio, advantage, **bounds) == pytest.approx(
        (loss, gradient), abs=1e-5
    )


RATIOS = [0.5, 0.5, 0.5, 0.9, 0.9, 1.5, 1.5, 1.5, 5.0, 5.0]
ADVANTAGES = [-2.0, 2.0, 0.0, -2.0, 2.0, -2.0, 2.0, 0.0, -2.0, 2.0]
CLIPPED = {
    "clip_frac_low": [0],  # 0.5 < 0.8 with A < 0
    "clip_frac_high": [6, 9],  # 1.5 and 5 > 1.28 with A > 0
}


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_clip_fractions_count_a_token_where_clipping_takes_its_gradient(dual_clip):
    logprobs = torch.tensor(RATIOS).log().requires_grad_()
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    sequence = torch.zeros(10, dtype=torch.int64)
    actions = Actions(logprobs, torch.zeros(10), torch.tensor(ADVANTAGES), sequence)
    loss, binds = clipped(actions, **bounds)
    assert not any(flags.requires_grad for flags in binds.values())
    expected = CLIPPED | ({"clip_frac_dual": [8]} if dual_clip else {})
    expected["clip_frac"] = sorted(index for places in expected.values() for index in places)
    assert {name: flags.nonzero()[:, 0].tolist() for name, flags in binds.items()} == expected
    # autograd agrees: no gradient although the advantage is not 0
    loss.sum().backward()
    flat = (logprobs.grad == 0) & (torch.tensor(ADVANTAGES) != 0)
    assert flat.tolist() == binds["clip_frac"].tolist()
    # negative control: ignoring the sign of the advantage counts twice as many
    outside = sum(ratio < 0.8 or ratio > 1.28 for ratio in RATIOS)
    assert (outside, int(binds["clip_frac"].sum())) == ((8, 4) if dual_clip else (8, 3))


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (0.55, 0.5 * 0.45**2, -0.45),  # within 0.2 of the old 0.5
        (0.9, 0.5 * 0.3**2, 0.0),  # moved too far towards the target of 1: clipped at 0.7
        (0.1, 0.5 * 0.9**2, -0.9),  # moved away: the unclipped error is larger
    ],
)
def test_the_clipped_value_loss_takes_the_worse_of_the_two(value, loss, gradient):
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, torch.tensor([0.5]), torch.tensor([1.0]), clip=0.2)
    result.sum().backward()
    assert (float(result.detach()), float(values.grad)) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)],
)
def test_kl_estimators_by_hand(estimator, value, gradient):
    # d = 0.5: exp(-0.5) = 0.606531; d/dx of k3 = 1 - exp(-d)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.5]), estimator)
    penalty.sum().backward()
    assert (float(penalty.detach()), float(logprobs.grad)) == pytest.approx(
        (value, gradient), abs=1e-6
    )


@pytest.mark.parametrize(
    ("log_ratio", "value", "gradient"),
    [  # exp(-d) + d - 1 and 1 - exp(-d), up to 10; above it 10, without a gradient
        (-200.0, 10.0, 0.0),  # exp(200) is infinite in float32
        (-20.0, 10.0, 0.0),
        (-10.0, 10.0, 0.0),  # 22026.466 - 11, not clamped
        (-3.0, 10.0, 0.0),  # 20.085537 - 4, not clamped
        (-2.0, 4.389056, -6.389056),
        (-1.0, 0.718282, -1.718282),
        (0.0, 0.0, 0.0),
        (1.0, 0.367879, 0.632121),
        (2.0, 1.135335, 0.864665),
        (10.0, 9.000045, 0.999955),
        (20.0, 10.0, 0.0),  # 19, not clamped
        (200.0, 10.0, 0.0),
    ],
)
def test_one_token_far_from_the_reference_costs_ten_nats_and_no_more(log_ratio, value, gradient):
    logprobs = torch.tensor([log_ratio - 1.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.0]), "k3")
    penalty.sum().backward()
    assert (float(penalty.detach()), float(logprobs.grad)) == pytest.approx(
        (value, gradient), abs=1e-5
    )


def test_k1_and_k3_are_unbiased_as_values_and_k2_is_not():
    """Sample from policy (0.8, 0.2) against reference (0.5, 0.5): KL = 0.192745."""
    policy, reference = torch.tensor([0.8] * 4 + [0.2]).log(), torch.tensor([0.5] * 5).log()
    means = {name: float(kl_penalty(policy, reference, name).mean()) for name in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(0.192745, abs=1e-5)
    assert means["k3"] == pytest.approx(0.192745, abs=1e-5)
    assert means["k2"] != pytest.approx(0.192745, abs=1e-2)


def test_preference_loss_by_hand():
    # beta 0.1, loss log(1 + exp(-margin))
    # pair 0: margin 0.1 * (2 - -1) = 0.3, loss 0.554355
    # pair 1: margin 0.1 * (0 - 1) = -0.1, loss 0.744397
    losses = preference_loss(torch.tensor([2.0, 0.0]), torch.tensor([-1.0, 1.0]), beta=0.1)
    assert losses.tolist() == pytest.approx([0.554355, 0.744397], abs=1e-5)
    # smoothing 0.1: 0.9 * 0.554355 + 0.1 * 0.854355
    assert float(
        preference_loss(torch.tensor(2.0), torch.tensor(-1.0), beta=0.1, label_smoothing=0.1)
    ) == pytest.approx(0.584355, abs=1e-5)


def test_constant_aggregation_divides_by_the_same_length_for_every_row():
    # two sequences have actions: each token weighs 1 / (10 * 2), so long sequences weigh more
    assert aggregation_weights(
        torch.tensor([0, 0, 0, 2]), 3, "constant", 10
    ).tolist() == pytest.approx([0.05] * 4)
    with pytest.raises(ValueError, match="needs the constant"):
        aggregation_weights(torch.tensor([0]), 1, "constant")


def test_token_aggregation_counts_every_token_the_same():
    assert aggregation_weights(torch.tensor([0, 0, 0, 2]), 3, "token").tolist() == [0.25] * 4


def test_sequence_aggregation_counts_every_row_with_actions_the_same():
    # two sequences have action tokens: 3 tokens share 1/2, one token has 1/2; sequence 1 has none
    assert aggregation_weights(torch.tensor([0, 0, 0, 2]), 3, "sequence").tolist() == pytest.approx(
        [1 / 6, 1 / 6, 1 / 6, 1 / 2]
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_weighted_sum_does_not_depend_on_the_split_into_micro_batches(aggregation):
    sequences, losses = (
        torch.tensor([0, 0, 0, 1, 2, 2]),
        torch.tensor([1.0, 5.0, 3.0, 8.0, 2.0, 4.0]),
    )
    weights = aggregation_weights(sequences, 3, aggregation, 4)
    whole = {"token": 23 / 6, "sequence": (3 + 8 + 3) / 3, "constant": 23 / 12}[aggregation]
    assert float((losses * weights).sum()) == pytest.approx(whole)
    assert sum(
        float((losses * weights)[sequences == sequence].sum()) for sequence in range(3)
    ) == pytest.approx(whole)
    # negative control: the mean of micro-batch means is another number
    assert sum(float(losses[part].mean()) for part in ([0, 1, 2, 3], [4, 5])) / 2 != pytest.approx(
        whole
    )


def test_importance_weights_are_capped_from_above_alone():
    learner, engine = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.5, -3.0, -1.0])
    # exp(0.5) = 1.64872, exp(2) capped, exp(-2) = 0.13534
    assert corrections(
        learner, engine, torch.tensor([0, 1, 2]), correction="token_truncate", cap=2.0
    ).tolist() == pytest.approx([1.64872, 2.0, 0.13534], abs=1e-4)


# sequence 0: token weights 2, 1/2, 3/2, product 1.5, geometric mean 1.5^(1/3) = 1.144714
# sequence 1: token weights 4/5, 4/5, product 0.64, geometric mean 0.8
WEIGHTS, OF = [2.0, 0.5, 1.5, 0.8, 0.8], [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("correction", "cap", "floor", "expected"),
    [
        ("none", 1.6, 0.0, [1.0] * 5),
        ("token_truncate", 1.6, 0.0, [1.6, 0.5, 1.5, 0.8, 0.8]),
        ("token_mask", 1.6, 0.0, [0.0, 0.5, 1.5, 0.8, 0.8]),
        ("token_mask", 1.6, 0.6, [0.0, 0.0, 1.5, 0.8, 0.8]),
        ("sequence_truncate", 1.2, 0.0, [1.2, 1.2, 1.2, 0.64, 0.64]),
        ("sequence_mask", 1.2, 0.0, [0.0, 0.0, 0.0, 0.64, 0.64]),
        ("sequence_mask", 1.6, 0.7, [1.5, 1.5, 1.5, 0.0, 0.0]),
        ("geometric_mask", 1.14, 0.0, [0.0, 0.0, 0.0, 1.0, 1.0]),
        ("geometric_mask", 1.15, 0.81, [1.0, 1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_each_correction_by_hand(correction, cap, floor, expected):
    learner = torch.tensor(WEIGHTS).log()
    given = corrections(
        learner, torch.zeros(5), torch.tensor(OF), correction=correction, cap=cap, floor=floor
    )
    assert given.tolist() == pytest.approx(expected, abs=1e-6)


def loss_of(function, ratios, advantages, sequence, **bounds):
    """Return the losses, the gradients of their sum by log-probability, and the metrics."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    actions = Actions(
        logprobs, torch.zeros(len(ratios)), torch.tensor(advantages), torch.tensor(sequence)
    )
    losses, logged = function(actions, SimpleNamespace(**bounds))
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist(), logged


def test_gspo_has_one_ratio_for_a_sequence_and_clips_all_of_it():
    # sequence 0: ratios 1.2, 1.25, geometric mean sqrt(1.5) = 1.224745, A = 1
    #   clipped at 1.1: loss -1.1, no gradient (clipped per token, 1.2 and 1.25 exceed 1.1 too)
    # sequence 1: ratios 2, 1/2, geometric mean 1, A = -2
    #   loss 2 per token, mean over its two tokens 2, gradient of the mean -A s / 2 = 1 per token
    bounds = {"clip_low": 0.1, "clip_high": 0.1}
    ratios, gain = [1.2, 1.25, 2.0, 0.5], [1.0, 1.0, -2.0, -2.0]
    losses, gradients, logged = loss_of(gspo, ratios, gain, [0, 0, 1, 1], **bounds)
    assert losses == pytest.approx([-1.1, -1.1, 2.0, 2.0], abs=1e-5)
    # gradients of the sum of the token losses: twice those of the mean
    assert gradients == pytest.approx([0.0, 0.0, 2.0, 2.0], abs=1e-5)
    assert logged["clip_frac_high"].tolist() == [True, True, False, False]
    # negative control: per token, the first token of sequence 1 would be clipped and differ
    one = loss_of(gspo, ratios, gain, [0, 1, 2, 3], **bounds)[0]
    assert one[2:] == pytest.approx([4.0, 1.8], abs=1e-5)


def test_cispo_weighs_every_token_and_drops_none():
    # ratios 3, 1.5, 0.2 with weights in [0, 1 + 1]: 2, 1.5, 0.2; each gradient is -weight * A
    gain = [1.0, -1.0, 2.0]
    losses, gradients, logged = loss_of(
        cispo, [3.0, 1.5, 0.2], gain, [0, 0, 1], clip_low=1.0, clip_high=1.0
    )
    assert gradients == pytest.approx([-2.0, 1.5, -0.4], abs=1e-5)
    assert losses == pytest.approx(
        [-2 * math.log(3), 1.5 * math.log(1.5), -0.4 * math.log(0.2)], abs=1e-5
    )
    assert logged["clip_frac"].tolist() == [True, False, False]
    low = loss_of(cispo, [0.2], [1.0], [0], clip_low=0.5, clip_high=1.0)
    assert low[1] == pytest.approx([-0.5], abs=1e-6)
    assert low[2]["clip_frac_low"].tolist() == [True]


def test_mismatch_of_equal_policies_is_nothing():
    assert mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]), cap=2.0) == {
        "kl": 0.0,
        "max_abs": 0.0,
        "ess": 1.0,
        "outside_frac": 0.0,
        "capped_frac": 0.0,
    }


def test_mismatch_of_no_token_is_not_known():
    assert mismatch(torch.zeros(0), torch.zeros(0), cap=2.0) == {}


def test_mismatch_against_hand_values():
    # w = 2, 0.5
    # kl = ((2 - 1 - ln 2) + (0.5 - 1 + ln 2)) / 2 = 0.25
    # ess = 2.5^2 / (2 * 4.25) = 0.735294
    gap = mismatch(torch.tensor([math.log(2.0), -math.log(2.0)]), torch.zeros(2), cap=1.9)
    assert gap["kl"] == pytest.approx(0.25, abs=1e-6)
    assert gap["max_abs"] == pytest.approx(math.log(2), abs=1e-6)
    assert gap["ess"] == pytest.approx(0.735294, abs=1e-6)
    assert gap["capped_frac"] == 0.5  # the weight of 2, truncated to 1.9
    # 1.22 and 0.82
    assert (
        mismatch(torch.tensor([0.2, 0.05, 0.0, -0.2]), torch.zeros(4), cap=2.0)["outside_frac"]
        == 0.5
    )


def test_mismatch_is_measured_from_the_engine_and_never_negative():
    """Check E_engine[k3] = KL(engine || learner).
    With engine (0.8, 0.2) and learner (0.5, 0.5): 0.8 ln 1.6 + 0.2 ln 0.4 = 0.192745.
    """
    engine, learner = torch.tensor([0.8] * 4 + [0.2]).log(), torch.tensor([0.5] * 5).log()
    assert mismatch(learner, engine, cap=2.0)["kl"] == pytest.approx(0.192745, abs=1e-5)
    assert mismatch(engine, learner, cap=2.0)["kl"] != pytest.approx(0.192745, abs=1e-2)
    assert mismatch(torch.tensor([-5.0]), torch.tensor([-0.1]), cap=2.0)["kl"] > 0


def test_a_log_probability_that_is_not_a_number_stays_visible():
    assert math.isnan(
        mismatch(torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, -1.0]), cap=2.0)["kl"]
    )
