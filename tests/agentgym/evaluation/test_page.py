"""Pages of an evaluation show both conventions and every failure, and escape all text."""

import re

from agentgym.evaluation.numbers import numbers_of
from agentgym.evaluation.protocol import protocol_from
from agentgym.evaluation.report import PAGE, failures, headline, notes, render, usage_facts
from agentgym.evaluation.result import Result, expected_slots
from agentgym.types import Item, Status, Trajectory, Turn, Usage

HOSTILE = '<script>alert("x")</script>'


def episode(item, status, success=False, error=None, usage=None):
    turn = Turn(HOSTILE, HOSTILE, float(success), info={"family": HOSTILE})
    return Trajectory(
        item,
        1,
        0,
        3,
        status,
        float(success) if status.is_valid else None,
        success,
        HOSTILE,
        (turn,),
        (),
        (),
        (),
        error=error,
        usage=usage,
    )


def result(**counted):
    """Return a result; `counted` sets the usage of the replies."""
    protocol = protocol_from({"envs": [{"env": {"name": "babyai"}}], "min_coverage": 0.9}, {})
    items = [Item("babyai", task) for task in range(3)]
    slots = list(expected_slots({"babyai": items}, {"babyai": (1,)}, {"babyai": [None] * 3}))
    spent = Usage(2, 1, 100, 0, 10, 1, **counted)
    slots[0] = slots[0].played(episode(items[0], Status.TERMINATED, True, usage=spent))
    slots[1] = slots[1].played(episode(items[1], Status.ENV_ERROR, error=HOSTILE))
    slots[1] = slots[1].played(episode(items[1], Status.MAX_TURNS))
    slots[2] = slots[2].played(episode(items[2], Status.TIMEOUT, error="late"))
    about = {
        "policy": HOSTILE,
        "protocol": HOSTILE,
        "min_coverage": 0.9,
        "valid": False,
        "notes": [HOSTILE],
        "cost": {"amount": 0.5, "currency": "EUR", "exact": False},
    }
    return Result({}, tuple(slots), numbers_of(slots, protocol), about), items


def test_the_terminal_gets_both_conventions_coverage_and_what_failed():
    found, _ = result()
    first, second, third = headline(found)
    assert "avg@1 50.0" in first
    assert "avg@1 33.3" in second
    assert "coverage 66.7%: 2 of 3 episodes count" in third
    told = list(notes(found))
    assert any("invalid: coverage 66.7% is below 90.0%" in line for line in told)
    assert any("1 scored, 1 truncated, 1 timeout" in line for line in told)
    assert any("1 episodes that count needed another attempt" in line for line in told)
    assert failures(found) == [
        ("babyai_1 #1", 1, "env_error", HOSTILE),
        ("babyai_2 #1", 1, "timeout", "late"),
    ]
    facts = usage_facts(found)
    assert facts["calls"].startswith("2 ") or facts["calls"].startswith("4 ")
    assert facts["input tokens"] == "unknown, at least 100"
    assert facts["cost"] == "at least 0.5 EUR"


def test_replies_that_were_cut_or_filtered_are_told_beside_the_score():
    found, _ = result(num_cut=1)
    (cut,) = [line for line in notes(found) if "replies" in line]
    assert cut == (
        "babyai: 1 of 1 replies were cut at the limit of their tokens, perhaps before the action;"
        " --max-new-tokens raises it."
    )
    assert cut in render(found, [])[PAGE].decode()
    found, _ = result(num_filtered=1)
    told = [line for line in notes(found) if "replies" in line]
    assert told == ["babyai: 1 of 1 replies were held back by a filter."]
    assert not any("replies" in line for line in notes(result()[0]))


def test_no_text_of_a_policy_or_an_environment_becomes_markup():
    found, items = result()
    files = render(found, [episode(items[0], Status.TERMINATED, True)])
    page = files[PAGE].decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=[\"'](?!data:)", page) == []
    assert files["evaluation.png"].startswith(b"\x89PNG")
