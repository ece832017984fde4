"""Packing computes at most half the tokens that padding does, on episodes as long as real ones."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "docs/results/packed.json").read_text())


packed = imported("packed")


def test_the_figures_follow_from_the_lengths_and_hold_the_limit(packed):
    assert RESULT["environments"].keys() == set(packed.ENVIRONMENTS)
    for found in RESULT["environments"].values():
        counted = packed.counted(found["lengths"])
        assert counted == {name: found[name] for name in counted}
        assert found["episodes"] >= 50
        assert found["tokens_ratio"] >= packed.LIMIT == 2.0
        rounds = zip(found["seconds"]["packed"], found["seconds"]["padded"], strict=True)
        assert all(own < rows for own, rows in rounds)


def test_tokens_are_counted_by_hand(packed, monkeypatch):
    monkeypatch.setattr(packed, "MICRO_BATCH", 2)
    monkeypatch.setattr(packed, "CONTEXT", 10)
    assert sorted(packed.in_order([2, 4, 99, 3])) == [2, 3, 4, 10]
    monkeypatch.setattr(packed, "in_order", list)
    found = packed.counted([2, 4, 10, 4])
    assert found["tokens_packed"] == 20
    assert found["tokens_padded"] == 40  # rows of 10 tokens
    assert found["tokens_padded_by_micro_batch"] == 28  # rows of 4, 4, 10 and 10 tokens
    assert (found["tokens_ratio"], found["tokens_ratio_by_micro_batch"]) == (2.0, 1.4)


def test_both_ways_have_the_same_loss(packed, monkeypatch):
    monkeypatch.setattr(packed, "MICRO_BATCH", 3)
    seconds = packed.timed([3, 20, 9, 5])
    assert {name: len(each) for name, each in seconds.items()} == {"packed": 3, "padded": 3}
    # negative control: a forgotten token is reported
    whole = packed.padded
    monkeypatch.setattr(packed, "padded", lambda *given: 1.01 * whole(*given))
    with pytest.raises(AssertionError):
        packed.timed([3, 20, 9, 5])
