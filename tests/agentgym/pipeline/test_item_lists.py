"""Item lists from ranges: what is written, and what is refused with nothing written."""

import json
import os
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.data.items import load_splits
from agentgym.pipeline.item_lists import parse_tasks

pytestmark = pytest.mark.integration


def made(*words):
    return main(["data", "make", *words])


def test_ranges_steps_and_single_ids_are_read_in_their_order():
    assert parse_tasks("0..3") == (0, 1, 2, 3)
    assert parse_tasks("1..9:4, 20,6..7") == (1, 5, 9, 20, 6, 7)


@pytest.mark.parametrize("text", ["", "5..2", "1..", "-1..3", "1..9:0", "1-9", "1,,2", "0x1", "١"])
def test_a_text_that_is_no_range_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"is no range of task ids; expected FIRST\.\.LAST"):
        parse_tasks(text)


def test_an_id_named_twice_and_too_many_are_refused():
    with pytest.raises(ConfigError, match=r"3\.\.5,4 has 4 more than once"):
        parse_tasks("3..5,4")
    with pytest.raises(ConfigError, match="more than 1000000 task ids"):
        parse_tasks("0..1000000")


def test_lists_have_the_published_layout_and_the_same_command_changes_nothing(robot, capsys):
    words = ("robot", "--train", "0..99", "--test", "100..150:50,167")
    assert made(*words) == 0
    printed = capsys.readouterr().out
    assert printed == (
        "robot: 100 train, 3 test items\n  data/robot/train/robot_train.json\n"
        "  data/robot/eval/robot_test.json\nto use them: --set data.path=data/robot\n"
    )
    cfg = load_config(overrides=["data.path=data/robot"])
    splits = load_splits(cfg.data.path, "robot", validation_fraction=0.1, seed=1)
    assert [item.item_id for item in splits.test] == ["robot_100", "robot_150", "robot_167"]
    assert len(splits.train) + len(splits.validation) == 100
    assert made(*words) == 0
    assert made("robot", "--train", "0..98", "--test", "100") == 2
    assert "data/robot/train/robot_train.json exists with other content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("robot", "--train", "0..9", "--test", "9..12"), "both have 9; a test must be held out"),
        (("robot", "--train", "0..9", "--test", "160..168"), "robot_168 name no task"),
        (("robot", "--train", "9..0", "--test", "10"), "'9..0' of '9..0' is no range"),
        (("robt", "--train", "0", "--test", "1"), "unknown environment 'robt'; did you mean 'robo"),
        (("my_game", "--train", "0", "--test", "1"), "'my_game' is no name of an environment"),
    ],
)
def test_bad_input_is_one_error_and_writes_nothing(robot, capsys, words, expected):
    assert made(*words, "--out", "lists") == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 2  # the error, and its page
    assert not os.path.exists("lists")


def test_an_environment_that_does_not_identify_tasks_opens_the_first_and_the_last(robot, capsys):
    robot.write_text(robot.read_text().replace("        identity=", "        # identity="))
    assert made("robot", "--train", "0..9", "--test", "10..168", "--out", "lists") == 2
    assert "opens no such task: robot: tasks are 0 to 167, got 168" in capsys.readouterr().err
    assert made("robot", "--train", "0..9", "--test", "10..167", "--out", "lists") == 0
    assert "warning: robot: items were compared by their ids alone" in capsys.readouterr().out


def test_a_test_task_that_equals_a_train_task_under_another_id_is_reported(robot, capsys):
    mirrored = "abs(place_of(task_id, reach)[0])"
    robot.write_text(robot.read_text().replace("str(place_of(task_id, reach))", f"str({mirrored})"))
    # the tasks 0 and 12 are 6 places west and 6 places east
    assert made("robot", "--train", "0", "--test", "12", "--out", "lists") == 1
    assert (
        "1 of 1 test items are the same task as a train item: robot_12 = robot_0; test is not"
        in (capsys.readouterr().out)
    )
    assert json.loads(Path("lists/eval/robot_test.json").read_text()) == [{"item_id": "robot_12"}]
