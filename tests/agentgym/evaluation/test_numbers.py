"""What an evaluation says, worked out by hand from a few slots."""

import json

import pytest

from agentgym.evaluation.intervals import FAILED
from agentgym.evaluation.numbers import ks, numbers_of
from agentgym.evaluation.protocol import protocol_from
from agentgym.evaluation.result import Attempt, Outcome, Slot
from agentgym.types import Usage

PROTOCOL = protocol_from({"envs": [{"env": {"name": "searchqa"}}]}, {})


def slot(item, sample, success, *, outcome=Outcome.SCORED, turns=4, family="nq", **fields):
    return Slot(
        "searchqa",
        f"searchqa_{item}",
        sample,
        outcome=outcome,
        success=success,
        reward=float(success) if outcome.counts else None,
        num_turns=turns,
        family=family,
        **fields,
    )


def numbers(slots):
    found = numbers_of(slots, PROTOCOL)["searchqa"]
    json.dumps(found, allow_nan=False)  # undefined is null, never a number
    return found


def test_every_k_has_its_estimate_and_a_failed_slot_leaves_k_above_the_rest():
    broken = slot(1, 2, False, outcome=Outcome.ENV_ERROR)
    found = numbers([slot(0, 1, True), slot(0, 2, False), slot(1, 1, True), broken])
    assert found["summary"]["avg_at_2"]["mean"] == 0.75
    assert [row["mean"] for row in found["curves"]["pass_at"]] == [0.75, 1.0]
    assert [row["mean"] for row in found["curves"]["pass_hat"]] == [0.75, 0.0]
    assert [row["num_items"] for row in found["curves"]["pass_hat"]] == [2, 1]
    assert found[FAILED]["avg_at_2"]["mean"] == 0.5
    assert "greedy" not in found["summary"]
    alone = numbers([slot(0, 1, True), slot(0, 2, True, outcome=Outcome.TIMEOUT)])
    assert alone["curves"]["pass_at"][1] is None
    assert "pass_at_2" not in alone["summary"]


def test_effort_is_told_of_successes_and_unknown_tokens_are_not_known():
    usage, untold = Usage(num_calls=1, output_tokens=30), Usage(num_calls=1, num_untold=1)
    slots = [
        slot(0, 1, True, turns=3, usage=usage, num_invalid=1),
        slot(1, 1, True, turns=5, usage=usage, num_invalid=0),
        slot(2, 1, False, turns=8, usage=untold, num_invalid=3),
    ]
    found = numbers(slots)
    assert (found["turns_to_success"]["mean"]["mean"], found["turns_to_success"]["median"]) == (
        4,
        4,
    )
    assert found["tokens_to_success"]["median"] == 30
    assert found["invalid_actions"]["mean"] == pytest.approx(4 / 16)
    assert found["success_within_turns"] == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, *[2 / 3] * 4], abs=1e-6
    )
    assert numbers([slot(0, 1, True, usage=untold)])["tokens_to_success"] is None
    assert numbers([slot(0, 1, False)])["invalid_actions"] is None


def test_families_are_clusters_from_five_on_and_each_has_its_success():
    few = [slot(item, 1, item % 2 == 0, family=f"set {item % 4}") for item in range(40)]
    many = [slot(item, 1, item % 5 < 2, family=f"set {item % 5}") for item in range(40)]
    assert numbers(few)["clusters"] == {"kind": "items", "num": 40}
    assert numbers(many)["clusters"] == {"kind": "families", "num": 5}
    narrow, wide = (numbers(each)["summary"]["avg_at_1"] for each in (few, many))
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])
    found = numbers(many)["by_family"]
    assert {name: row["success"]["mean"] for name, row in found.items()} == {
        "set 0": 1.0,
        "set 1": 1.0,
        "set 2": 0.0,
        "set 3": 0.0,
        "set 4": 0.0,
    }
    assert found["set 0"]["num_items"] == 8


def test_parts_are_averaged_over_the_episodes_that_were_judged_by_them():
    slots = [
        slot(0, 1, True, info={"parts": {"em": 1.0, "f1": 1.0}}),
        slot(1, 1, False, info={"parts": {"em": 0.0, "f1": 0.5}}),
        slot(2, 1, False, info={"parts": {"html": [1.0, 0.0], "string": {"exact_match": 1.0}}}),
        slot(3, 1, False, info={"parts": {"failed": "KeyError"}}),
        slot(4, 1, False),
    ]
    assert {name: tuple(row.values()) for name, row in numbers(slots)["parts"].items()} == {
        "em": (0.5, 2),
        "f1": (0.75, 2),
        "html": (0.0, 1),
        "string.exact_match": (1.0, 1),
    }


def test_nothing_played_says_nothing():
    found = numbers([Slot("searchqa", "searchqa_0", 1)])
    assert (found["summary"], found["curves"], found["reward"]) == ({}, {}, None)
    assert (ks(0), ks(1), ks(6)) == ((), (1,), (1, 2, 4, 6))


def test_slots_that_needed_another_attempt_are_set_beside_the_others():
    failed = (Attempt(Outcome.ENV_ERROR, "gone", 1, Usage()),)
    slots = [slot(item, 1, item >= 20, failed=failed if item < 10 else ()) for item in range(40)]
    found = numbers(slots)["retried"]
    assert (found["num"], found["success"], found["differs"]) == (10, 0.0, True)
    assert found["success_of_first_tries"] == pytest.approx(2 / 3)
