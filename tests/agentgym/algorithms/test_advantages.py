"""Advantages compared with hand-computed values."""

import math
from types import SimpleNamespace

import pytest
import torch

from agentgym.algorithms.advantages import ADVANTAGES, whiten, with_advantages
from agentgym.algorithms.batch import Batch, Experience


def experience(sequences, groups, env_ids=None, **more):
    """Build sequences from the rewards of their action tokens; a nested list is one turn."""
    rows = [[each if isinstance(each, list) else [each] for each in row] for row in sequences]
    if not any(isinstance(each, list) for row in sequences for each in row):
        rows = [[row] for row in sequences]
    # an observation before each turn
    tokens = [[x for turn in row for x in (None, *turn)] for row in rows]
    flat = [x for row in tokens for x in row]
    mask = torch.tensor([x is not None for x in flat])
    starts = torch.cumsum(torch.tensor([0, *map(len, tokens)]), 0)
    rewards = torch.tensor([float(x or 0.0) for x in flat])
    batch = Batch(
        torch.ones(len(flat), dtype=torch.int64),
        starts,
        mask,
        rewards,
        torch.zeros(len(flat)),
        torch.tensor(groups),
        torch.zeros(len(rows), dtype=torch.bool),
        1.0,
        env_ids,
    )
    none = torch.zeros(int(mask.sum()))
    return Experience(batch, rewards[mask], none, none + 1, none, **more)


def settings(gamma=1.0, gae_lambda=1.0):
    return SimpleNamespace(gamma=gamma, gae_lambda=gae_lambda)


def advantages(name, sequences, groups, gamma=1.0, **more):
    return ADVANTAGES[name](experience(sequences, groups, **more), settings(gamma))[0].tolist()


def outcomes(name, returns, groups):
    """Return the advantages of sequences with one action token each."""
    return advantages(name, [[value] for value in returns], groups)


# group 0: returns 1, 0, 0
#   mean 1/3, centered 2/3, -1/3, -1/3
#   variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735
# group 1: returns 2, 4
#   mean 3, centered -1, 1
#   variance (1 + 1) / 1 = 2, std 1.41421
RETURNS, GROUPS = [1.0, 2.0, 0.0, 4.0, 0.0], [0, 1, 0, 1, 0]


def test_grpo_standardises_within_each_group_with_the_sample_deviation():
    assert outcomes("grpo", RETURNS, GROUPS) == pytest.approx(
        [1.154701, -0.707107, -0.577350, 0.707107, -0.577350], abs=1e-5
    )
    # negative control: the population deviation of group 1 is 1
    assert outcomes("grpo", RETURNS, GROUPS)[1] != pytest.approx(-1.0, abs=0.1)


def test_dr_grpo_takes_the_mean_away_and_divides_by_nothing():
    assert outcomes("dr_grpo", RETURNS, GROUPS) == pytest.approx(
        [2 / 3, -1, -1 / 3, 1, -1 / 3], abs=1e-6
    )


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 - 0, 0 - 1/2, 0 - 1/2; 2 - 4, 4 - 2
    assert outcomes("rloo", RETURNS, GROUPS) == pytest.approx([1, -2, -0.5, 2, -0.5], abs=1e-6)


def test_reinforce_plus_plus_discounts_over_action_tokens_and_whitens_over_the_batch():
    # gamma 1/2
    # sequence 0: rewards 0, 0, 1 -> G = 1/4, 1/2, 1
    # sequence 1: rewards 0.5     -> G = 1/2
    # sequence 2: rewards 0, -1   -> G = -1/2, -1
    # mean of G: 0.75 / 6 = 0.125
    # squared differences: .015625 + .140625 + .765625 + .140625 + .390625 + 1.265625 = 2.71875
    # variance: 2.71875 / 5 = .54375
    got = advantages("reinforce++", [[0, 0, 1], [0.5], [0, -1]], [0, 1, 2], gamma=0.5)
    std = math.sqrt(0.54375)
    assert got == pytest.approx(
        [(g - 0.125) / std for g in (0.25, 0.5, 1, 0.5, -0.5, -1)], abs=1e-5
    )


def test_reinforce_plus_plus_sees_what_is_paid_per_token():
    # gamma 1: a penalty of 0.1 on the first of two tokens affects that token only
    # sequence 0: G = 0.9, 1.0
    # sequence 1: G = 0
    got = advantages("reinforce++", [[-0.1, 1.0], [0.0]], [0, 1])
    mean, std = 1.9 / 3, math.sqrt(((0.9 - 1.9 / 3) ** 2 + (1 - 1.9 / 3) ** 2 + (1.9 / 3) ** 2) / 2)
    assert got == pytest.approx([(0.9 - mean) / std, (1 - mean) / std, -mean / std], abs=1e-5)


def test_the_baseline_variant_takes_the_groups_mean_and_then_whitens_over_tokens():
    # centered returns: 0.5 (two tokens), -0.5 (one), 0, 0
    # per token: .5 .5 -.5 0 0, mean .1
    # deviation: sqrt((.16 + .16 + .36 + .01 + .01) / 4)
    got = advantages("reinforce++-baseline", [[0, 1], [0], [1], [1]], [0, 0, 1, 1])
    std = math.sqrt(0.7 / 4)
    assert got == pytest.approx(
        [0.4 / std, 0.4 / std, -0.6 / std, -0.1 / std, -0.1 / std], abs=1e-5
    )


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5
    # sequence 0: rewards 0, 1, values 0.5, 0.4, terminated
    #   delta_1 = 1 - 0.4 = 0.6
    #   delta_0 = 0.36 - 0.5 = -0.14
    #   A_1 = 0.6
    #   A_0 = -0.14 + 0.45 * 0.6 = 0.13
    # sequence 1: reward 0, value 0.2, truncated, V(end) = 0.3
    #   A = delta = 0.27 - 0.2 = 0.07
    given = experience(
        [[0, 1], [0]],
        [0, 1],
        values=torch.tensor([0.5, 0.4, 0.2]),
        end_values=torch.tensor([0.0, 0.3]),
    )
    got, targets = ADVANTAGES["gae"](given, settings(0.9, 0.5))
    plain = [0.13, 0.6, 0.07]
    assert targets.tolist() == pytest.approx([0.63, 1.0, 0.27], abs=1e-6)
    mean = 0.8 / 3
    std = math.sqrt(sum((value - mean) ** 2 for value in plain) / 2)
    assert got.tolist() == pytest.approx([(value - mean) / std for value in plain], abs=1e-5)


def test_with_gamma_and_lambda_one_the_critics_target_is_the_outcome_however_wrong_it_was():
    given = experience(
        [[0, 0, 1], [0, 0]], [0, 1], values=torch.randn(5), end_values=torch.zeros(2)
    )
    assert ADVANTAGES["gae"](given, settings())[1].tolist() == pytest.approx(
        [1, 1, 1, 0, 0], abs=1e-6
    )


def test_gae_over_turns_by_hand():
    # gamma 0.9, lambda 0.5
    # sequence 0: turns of 2 and 1 tokens, rewards 0.1 + 0.2 = 0.3 and 1, terminated
    # values of the states 0.5, 0.4 (later tokens of a turn have no state: their 9 is ignored)
    #   A_1 = delta_1 = 1 - 0.4 = 0.6
    #   delta_0 = 0.3 + 0.36 - 0.5 = 0.16
    #   A_0 = 0.16 + 0.45 * 0.6 = 0.43
    # sequence 1: one turn of 2 tokens, reward 0, value 0.2, truncated in a state of value 0.3
    #   A = 0.27 - 0.2 = 0.07
    given = experience(
        [[[0.1, 0.2], [1]], [[0, 0]]],
        [0, 1],
        values=torch.tensor([0.5, 9.0, 0.4, 0.2, 9.0]),
        end_values=torch.tensor([0.0, 0.3]),
    )
    got, targets = ADVANTAGES["turn_gae"](given, settings(0.9, 0.5))
    plain = [0.43, 0.43, 0.6, 0.07, 0.07]
    assert targets.tolist() == pytest.approx([0.93, 0.93, 1.0, 0.27, 0.27], abs=1e-6)
    mean = sum(plain) / 5
    std = math.sqrt(sum((value - mean) ** 2 for value in plain) / 4)
    assert got.tolist() == pytest.approx([(value - mean) / std for value in plain], abs=1e-5)
    # negative control: per-token GAE would also discount within a turn
    assert ADVANTAGES["gae"](given, settings(0.9, 0.5))[1].tolist() != pytest.approx(
        targets.tolist(), abs=0.1
    )


def test_turns_of_one_token_are_tokens():
    values, ends = torch.tensor([0.5, 0.4, 0.2]), torch.tensor([0.0, 0.3])
    rows = [[[0], [1]], [[0]]]
    one, other = (
        ADVANTAGES[name](
            experience(rows, [0, 1], values=values, end_values=ends), settings(0.9, 0.5)
        )
        for name in ("gae", "turn_gae")
    )
    for each, same in zip(one, other, strict=True):
        assert each.tolist() == pytest.approx(same.tolist(), abs=1e-6)


def test_what_is_no_advantage_per_token_is_refused_by_name(monkeypatch):
    given = experience([[1], [0]], [0, 0])
    for wrong in (torch.zeros(3), torch.tensor([0.0, math.nan])):
        monkeypatch.setitem(ADVANTAGES, "grpo", lambda *_, wrong=wrong: (wrong, None))
        with pytest.raises(ValueError, match=r"recipe grpo: advantages of shape \[\d\], expected"):
            with_advantages(given, SimpleNamespace(recipe="grpo"))


def test_gae_without_a_critic_is_refused():
    with pytest.raises(ValueError, match="needs a critic's values"):
        ADVANTAGES["gae"](experience([[1]], [0]), settings())


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_of_equal_returns_gets_exact_zeros(name, value):
    # the float32 sum of seven times 0.1 is not 0.7; a rounding error divided by eps must not become
    # an advantage
    assert outcomes(name, [value] * 7, [0] * 7) == [0.0] * 7


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"])
@pytest.mark.parametrize("value", [0.66, 66.0])
def test_returns_that_differ_by_rounding_are_equal_returns(name, value):
    # adjacent float32 values: near 66 they differ by 8e-6, which the group's deviation would scale
    # to advantages of 0.6
    above = float(torch.nextafter(torch.tensor(value), torch.tensor(100.0)))
    assert above > value
    assert outcomes(name, [value, above, value], [0] * 3) == [0.0] * 3
    assert outcomes(name, [value, 1.01 * value, value], [0] * 3)[1] > 0  # negative control


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_group_left_with_one_member_gets_zero_and_disturbs_no_other(name):
    assert outcomes(name, [5.0, 1.0, 0.0], [0, 1, 1])[0] == 0
    assert outcomes(name, [5.0, 1.0, 0.0], [0, 1, 1])[1:] == pytest.approx(
        outcomes(name, [1.0, 0.0], [0, 0])
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_the_order_of_the_rows_does_not_matter(name):
    returns, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 1])
    order = torch.tensor([5, 2, 0, 3, 1, 4])
    shuffled = torch.tensor(outcomes(name, returns[order].tolist(), groups[order].tolist()))
    assert torch.allclose(
        torch.tensor(outcomes(name, returns.tolist(), groups.tolist()))[order], shuffled, atol=1e-6
    )


def test_every_action_token_of_a_row_shares_its_outcome():
    assert advantages("dr_grpo", [[0, 0, 1], [0]], [0, 0]) == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_whitening_what_does_not_vary_gives_zeros():
    assert whiten(torch.full((4,), 0.1)).tolist() == [0.0] * 4
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline", "gae", "turn_gae"])
def test_each_environment_is_whitened_among_its_own(name):
    # one environment: returns 1, 0, one token each; mean 1/2, sample deviation 0.70711
    # the other: returns 100, 0; mean 50, sample deviation 70.711
    critic = {"values": torch.zeros(4), "end_values": torch.zeros(4)} if "gae" in name else {}
    sequences, groups, envs = [[1], [0], [100], [0]], [0, 0, 1, 1], torch.tensor([0, 0, 1, 1])
    expected = [0.707107, -0.707107, 0.707107, -0.707107]
    assert advantages(name, sequences, groups, env_ids=envs, **critic) == pytest.approx(
        expected, abs=1e-4
    )
    # negative control: normalized together, the environment with the larger rewards dominates
    assert advantages(name, sequences, groups, **critic)[0] != pytest.approx(0.707107, abs=0.1)
