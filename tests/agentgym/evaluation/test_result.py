"""A result has a row for every requested episode, with its outcome."""

import json

import numpy as np
import pytest

from agentgym.evaluation.numbers import Table
from agentgym.evaluation.result import (
    COLUMNS,
    OUTCOME_OF,
    Outcome,
    Result,
    ResultError,
    Slot,
    differences,
    expected_slots,
)
from agentgym.types import Item, Status, Trajectory, Turn, Usage

IDENTITY = {"policy": {"name": "expert"}, "protocol": {"seed": 1}, "items": {"babyai": "abc"}}


def episode(status, success=False, reward=0.0, turns=(), usage=None, error=None):
    return Trajectory(
        Item("babyai", 7),
        1,
        0,
        5,
        status,
        reward if status.is_valid else None,
        success,
        "go",
        tuple(turns),
        (),
        (),
        (),
        error=error,
        usage=usage,
        timing={"wall_s": 1.5},
    )


def slots():
    items = {"babyai": [Item("babyai", 7), Item("babyai", 8)], "textcraft": [Item("textcraft", 1)]}
    return expected_slots(
        items, {"babyai": (0, 1), "textcraft": (1,)}, {"babyai": ["t7", "t8"], "textcraft": [None]}
    )


def test_every_status_has_an_outcome_and_only_what_was_played_out_counts():
    assert set(OUTCOME_OF) == set(Status)
    for status, outcome in OUTCOME_OF.items():
        assert outcome.counts is status.is_valid
    assert [each for each in Outcome if each.counts] == [Outcome.SCORED, Outcome.TRUNCATED]


def test_a_slot_keeps_every_attempt_that_failed_and_adds_up_what_all_took():
    slot = slots()[1]
    spent = Usage(2, 1, 100, 40, 10)
    once = slot.played(episode(Status.ENV_ERROR, usage=spent, error="gone"))
    assert (once.outcome, once.counts, once.reward, once.total_usage) == (
        Outcome.ENV_ERROR,
        False,
        None,
        spent,
    )
    turn = Turn("left", "wall", 1.0, info={"family": "GoToObj", "invalid": True})
    last = Turn("go", "done", 1.0, info={"family": "GoToObj", "parts": {"f1": 0.5}})
    twice = once.played(
        episode(Status.TERMINATED, True, 1.0, [turn, last], Usage(3, 0, 7, 0, 5, 1))
    )
    assert (twice.outcome, twice.success, twice.family) == (Outcome.SCORED, True, "GoToObj")
    assert (twice.num_turns, twice.num_invalid, twice.info["parts"]) == (2, 1, {"f1": 0.5})
    assert [(each.outcome, each.error) for each in twice.failed] == [(Outcome.ENV_ERROR, "gone")]
    assert twice.total_usage == Usage(5, 1, 107, 40, 15, 1)
    assert twice.total_usage.known == {"input": None, "cached": None, "output": None}
    assert spent.known == {"input": 100, "cached": 40, "output": 10}
    assert twice.wall_s == 3.0


def test_a_row_of_a_version_that_counted_less_is_read():
    slot = slots()[0].played(episode(Status.TERMINATED, usage=Usage(2, 1, 100, 40, 10, 0, 1)))
    row = slot.to_row()
    where = COLUMNS.index("usage")
    assert Slot.from_row([*row[:where], row[where][:7], *row[where + 1 :]]) == slot


def test_tokens_on_record_are_the_usage_where_the_policy_counts_none():
    turns = [Turn("a", "b", 0.0, start=10, end=14), Turn("c", "d", 0.0, start=20, end=23)]
    slot = slots()[0].played(episode(Status.MAX_TURNS, turns=turns))
    assert slot.usage == Usage(num_calls=2, input_tokens=30, output_tokens=7, num_cache_untold=2)
    assert slot.usage.known == {"input": 30, "cached": None, "output": 7}
    assert slot.num_invalid is None
    assert slots()[0].played(episode(Status.TERMINATED)).usage.known["input"] == 0


def test_coverage_counts_slots_that_were_asked_for_and_not_only_those_that_came_back():
    first, second, *rest = slots()
    result = Result(
        IDENTITY,
        (
            first.played(episode(Status.TERMINATED, True, 1.0)),
            second.played(episode(Status.TIMEOUT, error="late")),
            *rest,
        ),
    )
    assert result.coverage == 1 / 5
    assert not result.is_complete
    assert (result.outcomes["scored"], result.outcomes["timeout"]) == (1, 1)
    assert result.outcomes["not_played"] == 3
    table = Table.of(result.of("babyai"))
    assert table.items == ("babyai_7", "babyai_8")
    np.testing.assert_array_equal(table.greedy, [1.0, np.nan])
    np.testing.assert_array_equal(table.samples, [[np.nan], [np.nan]])


def test_a_result_comes_back_from_its_files_and_holds_no_time_in_what_is_compared(tmp_path):
    first, *rest = slots()
    played = first.played(episode(Status.ENV_ERROR, usage=Usage(1), error="gone"))
    played = played.played(episode(Status.TERMINATED, True, 1.0))
    result = Result(IDENTITY, (played, *rest), {"babyai": 1}, {"name": "x"}, {"took_s": 2.0})
    result.save(tmp_path)
    back = Result.load(tmp_path)
    assert back == result
    assert (back.slots[0].wall_s, back.clock["took_s"]) == (3.0, 2.0)
    assert back.digest == result.digest
    assert b"took_s" not in result.to_bytes()
    tree = json.loads((tmp_path / "result.json").read_bytes())
    for name, value in (("schema_version", 99), ("digest", "0" * 64), ("columns", ["env"])):
        with pytest.raises(ResultError):
            Result.from_bytes(json.dumps({**tree, name: value}).encode())
    for wrong in (b"", b"[]", b"{}"):
        with pytest.raises(ResultError, match="no result"):
            Result.from_bytes(wrong)
    with pytest.raises(ResultError, match="cannot be read"):
        Result.load(tmp_path / "nowhere")


def test_results_compare_where_only_the_policy_differs():
    other = {**IDENTITY, "policy": {"name": "random"}}
    assert differences(IDENTITY, other) == []
    assert Result(other, ()).digest != Result(IDENTITY, ()).digest
    changed = {**IDENTITY, "protocol": {"seed": 2, "k": [1]}}
    assert differences(IDENTITY, changed) == ["protocol.seed: 1 and 2", "protocol.k: null and [1]"]


def test_a_slot_is_as_it_was_after_a_round_trip():
    slot = slots()[0].played(episode(Status.GRADER_ERROR, error="judge", usage=Usage(1, 1)))
    assert Slot.from_row(json.loads(json.dumps(slot.to_row()))) == slot
    assert slot.total_usage == Usage(1, 1)
