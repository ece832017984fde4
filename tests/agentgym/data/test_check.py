"""Item lists that cannot serve a run are refused before it starts."""

import json

import pytest

from agentgym.config import ConfigError, load_config
from agentgym.data.check import load_data, repeated_tasks
from agentgym.data.items import DataError
from agentgym.pipeline.run import run_step
from agentgym.types import Item


@pytest.fixture
def run(copy_run, tmp_path, tiny_params):
    """A finished run that this test may change."""
    return load_config(tiny_params(copy_run(tmp_path), deterministic=True))


@pytest.mark.parametrize(
    ("key", "recipe", "reason"),
    [
        ("evaluation.num_items", "grpo", r"\d+ test items of babyai; lower it"),
        ("rollout.items_per_step", "dpo", r"\d+ train items of babyai; lower it"),
        ("rollout.items_per_step", "grpo", r"\d+ items that .*; lower it to \d+, or add items"),
    ],
)
def test_more_items_than_there_are_is_bad_input(tmp_path, tiny_params, key, recipe, reason):
    cfg = load_config(tiny_params(tmp_path, algorithm={"recipe": recipe}), [f"{key}=1000"])
    with pytest.raises(ConfigError, match=rf"^{key} 1000 is more than the {reason}$"):
        load_data(cfg)


@pytest.mark.integration
def test_a_test_task_that_is_trained_on_under_another_id_is_told_by_the_run(
    tmp_path, tiny_params, caplog
):
    for name, tasks in (
        ("train/babyai_train.json", range(60)),
        ("eval/babyai_test.json", [*range(1000, 1012), 135]),
    ):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_text(
            json.dumps([{"item_id": f"babyai_{task}"} for task in tasks])
        )
    # on these two levels, babyai_53 and babyai_135 are the same world
    options = {"levels": ["GoToObj", "GoToRedBallNoDists"]}
    cfg = load_config(
        tiny_params(
            tmp_path / "run", data={"path": str(tmp_path / "data")}, env={"options": options}
        )
    )
    manifest = run_step("prepare", cfg).manifest
    expected = (
        "babyai: 1 of 13 test items are the same task as a train item: babyai_135 = babyai_53; test"
        " is not held out"
    )
    assert [warning for warning in manifest.results["warnings"] if "same task" in warning] == [
        expected
    ]
    assert expected in caplog.text


def test_items_the_environment_does_not_have_stop_the_run_before_it_starts(tmp_path, tiny_params):
    (tmp_path / "train").mkdir()
    (tmp_path / "eval").mkdir()
    (tmp_path / "train/sciworld_train.json").write_text(
        json.dumps([{"item_id": f"sciworld_{task}"} for task in range(60)])
    )
    (tmp_path / "eval/sciworld_test.json").write_text(
        json.dumps([{"item_id": f"sciworld_{task}"} for task in range(4630, 4645)])
    )
    cfg = load_config(
        tiny_params(
            tmp_path / "run", data={"path": str(tmp_path)}, env={"name": "sciworld", "options": {}}
        )
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"sciworld: sciworld_4639, .* and 1 more name no task of the environment as it is set"
        ),
    ):
        run_step("prepare", cfg)


def test_a_step_that_could_draw_an_item_twice_is_bad_input(tmp_path, tiny_params):
    """Allow a step to draw at most a third of the roughly 216 train items left after validation."""
    params = tiny_params(tmp_path)
    most = len(load_data(load_config(params)).train) // 3
    assert load_data(load_config(params, [f"rollout.items_per_step={most}"]))
    twice = (
        rf"^rollout.items_per_step {most + 1} is more than the {most} items that .* token for"
        rf" token; lower it to {most}, or add items$"
    )
    with pytest.raises(ConfigError, match=twice):
        load_data(load_config(params, [f"rollout.items_per_step={most + 1}"]))
    dynamic = [
        "algorithm.recipe=dapo",
        "algorithm.max_refills=2",
        f"rollout.items_per_step={most // 3 + 1}",
    ]
    with pytest.raises(
        ConfigError,
        match=rf"items_per_step {most // 3 + 1} x 3 rounds .* lower it to {most // 3}, or",
    ):
        load_data(load_config(params, dynamic))
    # sft draws demonstrations, not items
    assert load_data(
        load_config(params, ["algorithm.recipe=sft", f"rollout.items_per_step={most + 1}"])
    )


def test_tasks_under_several_ids_are_counted_by_split_and_named() -> None:
    items = [
        Item("toy", task, split)
        for split, tasks in (("train", (1, 2, 3)), ("validation", (4,)), ("test", (5, 6, 7)))
        for task in tasks
    ]
    assert repeated_tasks(items, ["a", "b", "a", "c", "b", "c", "d"]) == (
        "toy: 1 of 3 train items are the same task as another train item: toy_3 = toy_1",
        (
            "toy: 1 of 3 test items are the same task as a train item: toy_5 = toy_2; test is not"
            " held out"
        ),
        (
            "toy: 1 of 3 test items are the same task as a validation item: toy_6 = toy_4; test is"
            " not held out"
        ),
    )
    assert repeated_tasks(items, list("abcdefg")) == ()
    many = [Item("toy", task, "test") for task in range(8)]
    (warning,) = repeated_tasks(many, ["a"] * 8)
    assert warning.endswith(
        "toy_1 = toy_0, toy_2 = toy_0, toy_3 = toy_0, toy_4 = toy_0, toy_5 = toy_0 and 2 more"
    )


def test_items_that_name_no_task_are_refused_and_named() -> None:
    items = [Item("toy", task) for task in range(3)]
    with pytest.raises(
        DataError,
        match=(
            r"^toy: toy_0, toy_2 name no task of the environment as it is set; correct the lists or"
            r" its options$"
        ),
    ):
        repeated_tasks(items, [None, "a", None])
