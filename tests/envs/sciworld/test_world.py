"""None"""

import json
import re
import time
from types import SimpleNamespace

import pytest

from envs.env import ExpertFailed
from envs.sciworld import INSTRUCTIONS
from envs.sciworld.gold import solution
from envs.sciworld.world import GRAMMAR, UNREADABLE

FIND_LIVING = 2936 + 3  # solved in five moves


def finish(world, task_id):
    observations = [world.reset(task_id)]
    expert = world.expert()
    results = []
    while not results or not (results[-1].terminated or results[-1].truncated):
        results.append(world.step(expert.next_action()))
        observations.append(results[-1].observation)
    return observations, results


def test_a_solved_task_pays_one_in_parts_that_follow_the_score(world):
    observations, results = finish(world(), FIND_LIVING)
    assert observations[0].startswith(
        "Your task is to find a(n) living thing. First, focus on the thing."
    )
    assert "\nThis outside location is called the outside." in observations[0]
    scores = [result.info["score"] for result in results]
    assert scores == sorted(scores)
    for result, before in zip(results, [0, *scores], strict=False):
        assert result.reward == pytest.approx((result.info["score"] - before) / 100)
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert [result.success for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].info == {
        "score": 100,
        "moves": 5,
        "family": "find-living-thing",
        "variation": 3,
    }


def test_what_the_engine_cannot_read_is_an_invalid_action(world):
    playing = world()
    playing.reset(FIND_LIVING)
    told = playing.step("fly to the moon")
    assert told.info["invalid"]
    first, grammar = told.observation.split("\n")
    assert first == UNREADABLE
    assert grammar.startswith("Expected: look around | inventory | task | ")
    assert "invalid" not in playing.step("look around").info
    theirs = world(protocol="agentgym")
    theirs.reset(FIND_LIVING)
    assert theirs.step("fly to the moon").observation == UNREADABLE


def test_the_grammar_of_the_answer_is_that_of_the_instructions():
    assert set(re.findall("[a-z]+", GRAMMAR)) - {"or"} <= set(re.findall("[a-z0-9]+", INSTRUCTIONS))


def test_a_failed_task_is_over_and_worth_nothing(world):
    for reward, total in (("normalised", 0.0), ("agentgym", -100.0)):
        playing = world(reward=reward)
        playing.reset(FIND_LIVING)
        first = playing.step("open door to kitchen")
        assert first.info["score"] > 0
        last = playing.step("focus on agent")
        assert (last.terminated, last.success, last.info["score"]) == (True, False, -100)
        assert first.reward + last.reward == pytest.approx(total)


SCORED = 2936 + 150  # the first look scores 8 points


@pytest.mark.parametrize("reward", ["normalised", "agentgym"])
def test_what_the_first_look_is_worth_is_paid_with_the_first_turn_or_told_at_reset(world, reward):
    eight = 8.0 if reward == "agentgym" else 0.08
    for paid_at_reset, first in ((False, eight), (True, 0.0)):
        playing = world(reward=reward, paid_at_reset=paid_at_reset)
        playing.reset(SCORED)
        assert playing.score == 8
        assert playing.step("look around").reward == pytest.approx(first)
        assert playing.step("inventory").reward == 0
        failed = {"agentgym": -100.0, "normalised": 0.0}[reward]
        assert playing.step("focus on agent").reward == pytest.approx(failed - eight)


def test_too_many_moves_cut_the_episode(world):
    playing = world(max_moves=12)
    playing.reset(0)
    assert not playing.step("wait").truncated  # ten iterations and the move itself
    last = playing.step("wait1")
    assert (last.truncated, last.terminated, last.info["moves"]) == (True, False, 13)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "   ",
        "fly",
        "x" * 4000,
        "focus on " * 200,
        "\x00",
        "🤖",
        "look\naround",
        "reset",
        "exit",
        "go to go to",
        "0",
        "7",
    ],
)
def test_what_the_engine_cannot_read_is_an_observation(world, action):
    playing = world()
    playing.reset(FIND_LIVING)
    result = playing.step(action)
    assert result.observation
    assert (result.reward, result.terminated, result.success) == (0.0, False, False)


@pytest.mark.parametrize("reward", ["normalised", "agentgym"])
def test_an_action_on_which_the_engine_raises_ends_the_episode_worth_nothing(world, reward, caplog):
    playing = world(reward=reward)
    playing.reset(FIND_LIVING)
    paid = playing.step("open door to kitchen").reward
    assert paid > 0
    # the engine raises at this command
    slot, playing._slot = playing._slot, SimpleNamespace(call=lambda *_: slot.call("a", "shutdown"))
    last = playing.step("look around")
    playing._slot = slot
    assert (paid + last.reward, last.terminated, last.success) == (pytest.approx(0), True, False)
    assert "raised on 'look around'; the episode scores 0\nTraceback" in caplog.text
    playing.close()
    assert world().reset(FIND_LIVING)  # a new world gets another slot


@pytest.mark.parametrize("letter", ["İ", "ß", " ", "air "])
def test_a_long_action_takes_no_longer_than_a_short_one(world, letter):
    playing = world()
    playing.reset(FIND_LIVING)
    began = time.perf_counter()
    result = playing.step("look at " + letter * 16_000)
    assert time.perf_counter() - began < 1.5
    assert result.reward == 0


def test_an_ambiguous_request_is_answered_by_a_number(world):
    playing = world()
    playing.reset(FIND_LIVING)
    asked = playing.step("open door")
    assert asked.observation.startswith("Ambiguous request")
    assert "0:" in asked.observation
    assert "is now open" in playing.step("0").observation


def test_the_picture_shows_rooms_objects_and_what_is_held(world):
    playing = world()
    playing.reset(FIND_LIVING)
    playing.step("focus on blue jay egg")
    playing.step("pick up blue jay egg")
    kind, data = playing.render()
    picture = json.loads(data)
    assert kind == "application/json"
    assert picture["room"] == "outside"
    assert "blue jay" in [thing["name"] for thing in picture["inventory"]]
    rooms = {
        room["name"]: [thing["name"] for thing in room["objects"]] for room in picture["rooms"]
    }
    assert {"kitchen", "foundry", "greenhouse", "outside"} <= rooms.keys()
    assert "fountain" in rooms["outside"]
    assert "stove" in rooms["kitchen"]
    assert "agent" not in rooms["outside"]
    kitchen = next(room for room in picture["rooms"] if room["name"] == "kitchen")
    assert any("temperature_c" in thing for thing in kitchen["objects"])


def test_hints_are_what_the_engine_would_do_and_change_nothing(world):
    playing, other = world(), world()
    playing.reset(FIND_LIVING)
    told = other.reset(FIND_LIVING)
    hints = playing.hints()
    assert "open door to kitchen" in hints
    assert "hint" not in told.lower()
    for action in ("open door to kitchen", "go to kitchen", "look around"):
        assert playing.step(action) == other.step(action)


def test_the_expert_knows_the_way_from_the_beginning_alone(world):
    playing = world()
    playing.reset(FIND_LIVING)
    expert = playing.expert()
    assert expert.next_action() == solution(playing.task)[0]
    playing.step("wait1")
    with pytest.raises(ExpertFailed, match="left the recorded solution of find-living-thing 3"):
        expert.next_action()
