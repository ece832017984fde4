"""Tests for what enters a batch and for the positions of its rewards."""

from dataclasses import replace

import pytest
import torch

from agentgym.algorithms.batch import (
    NOT_ASKED,
    Batch,
    Experience,
    learnable,
    overlong_penalty,
    to_batch,
    why_not,
)
from agentgym.types import Item, Status, Trajectory, Turn


def trajectory(
    ids, mask, reward=1.0, status=Status.TERMINATED, task_id=0, env="babyai", temperature=1.0
):
    return Trajectory(
        item=Item(env, task_id),
        sample=0,
        step=1,
        max_turns=4,
        status=status,
        reward=reward if status.is_valid else None,
        success=False,
        first_observation="",
        turns=(),
        input_ids=tuple(ids),
        action_mask=tuple(bool(m) for m in mask),
        logprobs=tuple(-0.5 * m for m in mask),
        temperature=temperature,
    )


def test_the_outcome_lies_on_the_last_action_token_not_on_the_observation_after_it():
    batch = to_batch([trajectory([7, 8, 9, 6, 5], [0, 1, 1, 0, 0], reward=0.7)])
    assert batch.rewards.tolist() == pytest.approx([0, 0, 0.7, 0, 0])
    assert batch.returns.tolist() == pytest.approx([0.7])


def test_a_reward_on_an_observation_token_would_be_lost():
    """Negative control: placing it on the last attended token gives a return of 0."""
    batch = to_batch([trajectory([7, 8, 9], [0, 1, 0], reward=0.7)])
    batch.rewards[:] = torch.tensor([0, 0, 0.7])
    assert batch.returns.tolist() == [0]


def test_tokens_that_the_engine_was_not_asked_about_are_marked():
    turns = [Turn("", "", 0.0, 1, 2), Turn("", "", 0.0, 3, 5, has_logprobs=False)]
    episode = replace(trajectory([1, 2, 3, 4, 5], [0, 1, 0, 1, 1]), turns=tuple(turns))
    assert to_batch([episode]).logprobs.tolist() == [0, -0.5, 0, NOT_ASKED, NOT_ASKED]


def test_rows_are_packed_end_to_end_in_the_order_given():
    batch = to_batch(
        [
            trajectory([1, 2, 3], [0, 1, 0], 1.0, task_id=5),
            trajectory([4, 5], [0, 1], 0.0, task_id=6),
        ]
    )
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.starts.tolist() == [0, 3, 5]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1]
    assert batch.action_mask.tolist() == [False, True, False, False, True]
    assert batch.logprobs.tolist() == [0, -0.5, 0, 0, -0.5]
    assert batch.returns.tolist() == [1, 0]


def test_failed_environments_and_rows_without_actions_never_enter():
    sequences = [
        trajectory([1, 2], [0, 1], status=Status.ENV_ERROR),
        trajectory([1, 3], [0, 1], status=Status.TIMEOUT),
        trajectory([1, 4], [0, 0], status=Status.MAX_TOKENS),
        trajectory([1, 5], [0, 1], status=Status.MAX_TURNS, reward=0.0),
        trajectory([1, 6], [0, 1], status=Status.MAX_TOKENS, reward=0.0),
        trajectory([1, 8], [0, 1], status=Status.ENV_LIMIT, reward=0.0),
        trajectory([1, 7], [0, 1]),
    ]
    kept = learnable(sequences, truncated="zero")
    assert to_batch(kept).input_ids.tolist() == [1, 5, 1, 6, 1, 8, 1, 7]
    assert [each.input_ids for each in learnable(sequences, truncated="mask")] == [(1, 7)]
    assert why_not(sequences, truncated="mask") == [
        "the environment failed: env_error",
        "the environment failed: timeout",
        "no action",
        "cut: max_turns",
        "cut: max_tokens",
        "cut: env_limit",
        "",
    ]


def test_what_cannot_be_learned_from_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"1 of 2 trajectories .*: \['the environment failed: env"):
        to_batch([trajectory([1, 2], [0, 1]), trajectory([1, 2], [0, 1], status=Status.ENV_ERROR)])
    with pytest.raises(ValueError, match="0 of 0"):
        to_batch([])


def test_samples_of_one_item_share_a_group_and_equal_ids_of_two_environments_do_not():
    sequences = [
        trajectory([1, 2], [0, 1], task_id=task, env=env)
        for task, env in ((9, "a"), (3, "a"), (9, "a"), (9, "b"))
    ]
    assert to_batch(sequences).group_ids.tolist() == [0, 1, 0, 2]


def test_samples_of_two_temperatures_are_refused():
    with pytest.raises(ValueError, match=r"one temperature; got \[0.7, 1.0\]"):
        to_batch([trajectory([1, 2], [0, 1], temperature=0.7), trajectory([1, 2], [0, 1])])


def test_select_keeps_every_field_of_the_chosen_rows_in_the_order_asked_for():
    sequences = [
        trajectory([1, 2, 3], [0, 1, 1], 0.25, task_id=4, temperature=0.5),
        trajectory([4, 5], [0, 1], 0.5, task_id=5, temperature=0.5),
        trajectory([6, 7, 8, 9], [0, 1, 0, 1], 0.75, task_id=4, temperature=0.5),
    ]
    part = to_batch(sequences).select(torch.tensor([2, 0]))
    assert part.input_ids.tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert part.starts.tolist() == [0, 4, 7]
    assert part.action_mask.tolist() == [False, True, False, True, False, True, True]
    assert part.rewards.tolist() == [0, 0, 0, 0.75, 0, 0, 0.25]
    assert part.logprobs.tolist() == [0, -0.5, 0, -0.5, 0, -0.5, -0.5]
    assert part.group_ids.tolist() == [0, 0]
    assert part.returns.tolist() == [0.75, 0.25]
    assert part.temperature == 0.5


def telling(trajectories):
    return learnable(trajectories, truncated="zero", signal=True)


def group(task_id, *rewards):
    return [trajectory([1, 2], [0, 1], reward, task_id=task_id) for reward in rewards]


def test_only_groups_whose_rewards_differ_carry_signal():
    lost = trajectory([1, 2], [0, 1], task_id=3, status=Status.ENV_ERROR)
    sequences = [
        *group(1, 1.0, 1.0),
        *group(2, 0.0, 1.0),
        *group(3, 1.0),
        lost,
        *group(4, 0.0, 0.0),
    ]
    assert [sequence.item.task_id for sequence in telling(sequences)] == [2, 2]


# the outcome of one SciWorld task, summed along two paths
ROUNDED = [0.08 + 0.08 + 0.5, 0.16 + 0.42 + 0.08, 0.66, 0.6600000000000001]


def test_rewards_that_differ_by_rounding_carry_no_signal():
    assert len(set(ROUNDED)) > 1
    sequences = [
        *group(1, *ROUNDED),
        *group(2, 66.0, 66.00000000000001),
        *group(3, 0.66, 0.67),
        *group(4, 0.0, 1e-5),
    ]
    assert [sequence.item.task_id for sequence in telling(sequences)] == [3, 3, 4, 4]
    # float32 keeps five decimals of values in the hundreds
    assert not telling(group(1, 99.99999, 100.0))


@pytest.mark.parametrize(
    ("turns", "tokens", "expected"),
    [
        (7, 10, 0.0),  # 70 % of 10 turns: before the last quarter
        (9, 10, -0.3),  # 90 %: 0.15 / 0.25 of 0.5
        (10, 10, -0.5),
        (1, 95, -0.4),  # 95 % of 100 tokens: 0.2 / 0.25 of 0.5
    ],
)
def test_the_overlong_penalty_grows_over_the_last_part_of_either_budget(turns, tokens, expected):
    turn = Turn("a", "o", 0.0, 0, 1, 0)
    episode = replace(trajectory([1] * tokens, [0] * tokens), turns=(turn,) * turns, max_turns=10)
    assert overlong_penalty(episode, context_tokens=100, buffer=0.25, penalty=0.5) == pytest.approx(
        expected
    )


def test_a_penalty_is_part_of_the_outcome_and_lies_where_it_lies():
    batch = to_batch([trajectory([7, 8, 9], [0, 1, 0], reward=1.0)], penalty=lambda _: -0.25)
    assert batch.rewards.tolist() == [0, 0.75, 0]


def test_a_penalty_is_added_before_rounding():
    # 2/3 in float32 is 0.66666669; of float32(1) and float32(1/3) the difference is 0.66666663
    batch = to_batch([trajectory([7, 8, 9], [0, 1, 0], reward=1.0)], penalty=lambda _: -1 / 3)
    assert batch.rewards[1] == torch.tensor(1 - 1 / 3)
    assert batch.rewards[1] != torch.tensor(1.0) - torch.tensor(1 / 3)  # negative control


def test_cut_episodes_are_marked():
    ends = (Status.TERMINATED, Status.MAX_TURNS, Status.MAX_TOKENS, Status.ENV_LIMIT)
    sequences = [trajectory([1, 2], [0, 1], status=status) for status in ends]
    assert to_batch(sequences).truncated.tolist() == [False, True, True, True]


def test_shuffled_outcomes_are_the_same_ones_on_other_rows_last_actions():
    sequences = [trajectory([1] * (3 + n), [0, 1, *[0] * n, 1], reward=float(n)) for n in range(20)]
    batch = to_batch(sequences)
    shuffled = batch.with_shuffled_outcomes(seed=0, step=1)
    assert shuffled.returns.tolist() != batch.returns.tolist()
    assert sorted(shuffled.returns.tolist()) == sorted(batch.returns.tolist())
    assert shuffled.rewards[~shuffled.action_mask].abs().sum() == 0
    ends = batch.starts[1:] - 1
    assert torch.equal(shuffled.rewards[ends], shuffled.returns)
    assert torch.equal(batch.with_shuffled_outcomes(seed=0, step=1).rewards, shuffled.rewards)
    assert not torch.equal(batch.with_shuffled_outcomes(seed=0, step=2).rewards, shuffled.rewards)


def test_rows_know_their_environment_and_so_does_every_selection():
    sequences = [
        trajectory([1, 2], [0, 1], env=env, task_id=index)
        for index, env in enumerate(["babyai", "textcraft", "babyai"])
    ]
    batch = to_batch(sequences)
    assert batch.env_ids.tolist() == [0, 1, 0]
    assert batch.select(torch.tensor([2, 1])).env_ids.tolist() == [0, 1]


def test_rewards_of_turns_stand_on_the_turns_that_were_paid_and_sum_to_the_outcome():
    turns = (Turn("a", "o", 0.25, 1, 3), Turn("b", "o", 0.0, 4, 5), Turn("c", "o", 0.5, 6, 7))
    episode = replace(trajectory([1] * 8, [0, 1, 1, 0, 1, 0, 1, 0], 0.75), turns=turns)
    batch = to_batch([episode, episode], turn_rewards=True, penalty=lambda _: -0.25)
    one = [0, 0, 0.25, 0, 0, 0, 0.25, 0]  # the penalty counts at the end
    assert batch.rewards.tolist() == one * 2
    assert batch.returns.tolist() == [0.5, 0.5]
    assert batch.turn[batch.action_mask].tolist() == [0, 0, 1, 2, 3, 3, 4, 5]
    assert to_batch([episode]).rewards.tolist() == [0, 0, 0, 0, 0, 0, 0.75, 0]
    forged = replace(episode, reward=1.0)
    with pytest.raises(AssertionError, match="turns do not sum to it"):
        to_batch([forged], turn_rewards=True)


def batch():
    """Return two sequences, with o for observation and a for action: o a a o a and o a."""
    mask = torch.tensor([False, True, True, False, True, False, True])
    zeros = torch.zeros(7)
    return Batch(
        torch.arange(7),
        torch.tensor([0, 5, 7]),
        mask,
        zeros,
        zeros,
        torch.tensor([0, 0]),
        torch.tensor([False, False]),
        1.0,
    )


def experience(**changes):
    nothing = torch.zeros(4)
    given = {"logprobs": nothing, "entropies": nothing, "corrections": torch.ones(4)}
    given["rewards"] = torch.tensor([0.5, 0.0, 1.0, 2.0])
    return Experience(batch(), **{**given, **changes})


def test_action_tokens_know_their_sequence_and_their_turn():
    known = experience()
    assert known.sequence.tolist() == [0, 0, 0, 1]
    assert known.turn.tolist() == [0, 0, 1, 2]


def test_a_return_is_the_plain_sum_of_a_sequences_rewards():
    assert experience().returns.tolist() == [1.5, 2.0]


def test_what_moves_moves_whole_and_what_is_not_there_stays_away():
    there = experience(values=torch.ones(4)).to(torch.device("meta"))
    assert {there.logprobs.device.type, there.values.device.type} == {"meta"}
    assert there.batch.input_ids.device.type == "meta"
    assert there.reference is None
    assert there.metrics == {}
