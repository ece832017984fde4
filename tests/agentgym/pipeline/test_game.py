"""A person and a model play in the terminal through the same conversation as policies."""

import pytest

from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.data.items import DataError
from agentgym.pipeline.game import Game, play_games
from agentgym.types import Status


@pytest.fixture
def cfg(copy_run, tmp_path, tiny_params, tiny_endpoint):
    return load_config(tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True))


def test_a_person_plays_and_a_registered_model_after_them(cfg):
    told, lines = [], iter(["turn left", "?", "move forward", None])
    (played,) = play_games(cfg, Game("babyai"), told.append, lambda _: next(lines))
    assert [turn.action for turn in played.turns] == ["turn left", "move forward"]
    assert played.status is Status.MAX_TURNS  # the player gave up
    assert "drop, move forward, pickup, toggle, turn left, turn right" in told
    assert told[-1].startswith("--- not solved: max_turns, 2 turns")

    told.clear()
    game = Game("babyai", "models:/agentgym-babyai@champion", num_games=2)
    first, second = play_games(cfg, game, told.append, lambda _: pytest.fail("nobody is asked"))
    assert [first.item.item_id, second.item.item_id] == ["babyai_1000", "babyai_1001"]
    assert [line for line in told if line.startswith("> ")] == [
        f"> {turn.reply or turn.action}" for each in (first, second) for turn in each.turns
    ]
    assert first.input_ids


def test_tasks_are_played_without_lists_of_items(tmp_path, tiny_params, tiny_endpoint):
    cfg = load_config(tiny_params(tmp_path, endpoint=tiny_endpoint), [f"data.path={tmp_path}/none"])
    for game, items in (
        (Game("babyai", "random", item="7"), ["babyai_7"]),
        (Game("babyai", "random", item="7, babyai_3"), ["babyai_7", "babyai_3"]),
        (Game("babyai", "random", num_games=2), ["babyai_0", "babyai_1"]),
    ):
        told = []
        played = play_games(cfg, game, told.append, lambda _: None)
        assert [each.item.item_id for each in played] == items
        notice = f"{tmp_path}/none has no lists of babyai: playing babyai_0, babyai_1; --item N"
        assert [line.startswith(notice) for line in told[:1]] == [not game.item]


@pytest.mark.integration
def test_without_lists_the_first_tasks_are_those_that_the_environment_knows(robot):
    text = robot.read_text().replace("if not 0 <=", "if not 3 <=")
    robot.write_text(text.replace("offers_hints=True,", "offers_hints=True, probe_task=3,"))
    told = []
    played = play_games(load_config(), Game("robot", "expert"), told.append, lambda _: None)
    assert [(each.item.item_id, each.success) for each in played] == [("robot_3", True)]
    robot.write_text(robot.read_text().replace("        identity=", "        # identity="))
    (played,) = play_games(load_config(), Game("robot", "expert"), told.append, lambda _: None)
    assert "tasks are 0 to 167, got 0" in played.error


def test_one_game_needs_no_more_items_than_one(cfg):
    """Ignore the number of items of an evaluation."""
    cfg = replace_num_items(cfg, 512)
    (played,) = play_games(cfg, Game("babyai"), lambda _: None, lambda _: None)
    assert played.item.item_id == "babyai_1000"
    with pytest.raises(DataError, match=r"babyai: items\.num 99 is more than the 12 items"):
        play_games(cfg, Game("babyai", num_games=99), print, input)


def replace_num_items(cfg, num):
    return cfg.model_copy(
        update={"evaluation": cfg.evaluation.model_copy(update={"num_items": num})}
    )


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("textcraft_3", "--item textcraft_3 is of textcraft, and --env is babyai"),
        ("key", "--item key ends in no number of a task; expected babyai_17, or 17 alone"),
        (str(2**64), f"--item {2**64} ends in no number of a task"),
    ],
)
def test_an_item_that_is_none_of_the_environment_is_refused_before_anything_starts(item, said):
    with pytest.raises(ConfigError, match=said):
        play_games(RunConfig(), Game("babyai", item=item), print, input)
