"""Bad input ends with one line and exit code 2 before anything starts."""

import json

import pytest


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.gruop_size=4", "unknown key rollout.gruop_size; did you mean rollout.group_size?"),
        ("optimiser.lr=fast", "optimiser.lr: input should be a valid number"),
        ("horizon.max_turns=[12,8,5]", "horizon.max_turns [12, 8, 5] must not decrease"),
        ("rollout.group_size=1", "leaves grpo nothing to compare"),
        ("model.context_tokens=64", "is too small for 12 turns"),
        ("algorithm.recipe=gpro", "algorithm.recipe 'gpro' is unknown; known: grpo"),
        ("no-equals-sign", "must look like key.path=value"),
    ],
)
def test_a_wrong_parameter_is_one_line_and_starts_nothing(fresh, override, line):
    ended = fresh.pipeline(override)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (fresh.folder / ".agentgym/store").exists()


def test_an_eval_item_in_the_train_file_is_named_and_starts_nothing(fresh):
    assert fresh.run("dvc", "pull").returncode == 0
    train = fresh.folder / "data/AgentGym-RL-Data-ID/train/babyai_train.json"
    items = json.loads(train.read_text())
    leaked = json.loads((fresh.folder / "data/AgentGym-RL-Data-ID/eval/babyai_test.json").read_text())[3]
    train.write_text(json.dumps([*items, leaked]))
    ended = fresh.pipeline()
    assert ended.returncode == 2
    assert leaked["item_id"] in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (fresh.folder / ".agentgym/store").exists()


def test_a_step_whose_parent_is_not_done_says_which_to_run(fresh):
    assert fresh.run("dvc", "pull").returncode == 0
    ended = fresh.run("agentgym", "step", "stage-2")
    assert ended.returncode == 2
    assert "step stage-2 needs prepare, stage-1 first; run `agentgym step prepare`" in ended.stderr


def test_a_dataset_that_was_not_pulled_is_named_with_the_command_that_pulls_it(fresh):
    ended = fresh.run("agentgym", "plan")
    assert ended.returncode == 2
    assert "dataset not pulled" in ended.stderr
    assert "dvc pull data/AgentGym-RL-Data-ID.dvc" in ended.stderr
