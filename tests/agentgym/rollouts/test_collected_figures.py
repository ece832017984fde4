"""Metrics of a batch: per environment, per group, and by cause of truncation."""

from dataclasses import replace

import pytest

from agentgym.rollouts.collect import rollout_metrics, validation_metrics
from agentgym.types import Item, Status, Trajectory, Turn


def trajectory(env, reward, *, num_turns=1, status=Status.TERMINATED):
    return Trajectory(
        item=Item(env, 0),
        sample=0,
        step=1,
        max_turns=4,
        status=status,
        reward=reward if status.is_valid else None,
        success=reward == 1.0,
        first_observation="",
        turns=(Turn("go", "gone", 0.0, 0, 1, 0),) * num_turns,
        input_ids=(1, 2),
        action_mask=(False, True),
        logprobs=(0.0, -0.5),
        temperature=1.0,
    )


def test_environments_that_meet_have_figures_of_their_own():
    both = [
        trajectory("babyai", 1.0),
        trajectory("babyai", 0.0, num_turns=3),
        trajectory("textcraft", 0.5, num_turns=2),
    ]
    metrics = rollout_metrics([*both, trajectory("textcraft", 0.0, status=Status.ENV_ERROR)])
    assert metrics["rollout/success"] == pytest.approx(1 / 3)
    assert metrics["rollout/env_error_frac"] == pytest.approx(1 / 4)
    own = {name: value for name, value in metrics.items() if name.count("/") == 2}
    assert own == {
        "rollout/babyai/num_episodes": 2,
        "rollout/babyai/success": 0.5,
        "rollout/babyai/reward_mean": 0.5,
        "rollout/babyai/turns_mean": 2,
        "rollout/textcraft/num_episodes": 1,
        "rollout/textcraft/success": 0,
        "rollout/textcraft/reward_mean": 0.5,
        "rollout/textcraft/turns_mean": 2,
    }
    assert validation_metrics(both) == {
        "validation/success": pytest.approx(1 / 3),
        "validation/babyai/success": 0.5,
        "validation/textcraft/success": 0,
    }


def test_groups_of_equal_rewards_are_counted_up_to_rounding():
    def frac(*groups):
        rows = [
            replace(trajectory("sciworld", reward), item=Item("sciworld", i))
            for i, rewards in enumerate(groups)
            for reward in rewards
        ]
        return rollout_metrics(rows)["rollout/equal_reward_groups_frac"]

    assert frac([0.66, 0.6600000000000001], [0.0, 0.0], [0.66, 0.67], [0.5]) == 0.75
    assert frac([0.0, 1.0], [66.0, 66.00000000000001]) == 0.5


def test_one_environment_has_no_second_set_of_figures():
    assert not [name for name in rollout_metrics([trajectory("babyai", 1.0)]) if "babyai" in name]


def test_each_kind_of_cut_is_counted_by_its_name():
    ends = (
        Status.MAX_TURNS,
        Status.MAX_TOKENS,
        Status.ENV_LIMIT,
        Status.ENV_LIMIT,
        Status.TERMINATED,
        Status.TIMEOUT,
    )
    metrics = rollout_metrics([trajectory("babyai", 0.0, status=status) for status in ends])
    shares = {
        name: metrics[f"rollout/{name}"]
        for name in ("max_turns_frac", "max_tokens_frac", "env_limit_frac")
    }
    assert shares == {"max_turns_frac": 1 / 5, "max_tokens_frac": 1 / 5, "env_limit_frac": 2 / 5}
