"""Bars where there is a terminal; where there is none a line now and then."""

import io

import pytest

from agentgym.console import progress
from agentgym.console.progress import Bars
from agentgym.console.terminal import PlainConsole


@pytest.fixture
def now(monkeypatch):
    """The clock, as a list of one number."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_without_a_terminal_a_part_says_a_line_every_twenty_seconds(now):
    stream = io.StringIO()
    with Bars(PlainConsole(file=stream, force_terminal=False)) as bars:
        bars.start("stage 1", 60)
        for second in range(45):
            now[0] = second
            bars.advance(note=f"step {second}")
    assert stream.getvalue().splitlines() == [
        "  stage 1: 22/60 step 21",
        "  stage 1: 43/60 step 42",
    ]


def test_a_terminal_has_a_bar_per_part_and_keeps_the_last_note():
    stream = io.StringIO()
    with Bars(PlainConsole(file=stream, force_terminal=True, width=200)) as bars:
        bars.start("stage 1", 2)
        bars.advance(1, "success 0.5")
        bars.advance(1)
        bars.start("stage 2", 4)
        bars.advance(3)
    last = stream.getvalue()
    for shown in ("stage 1", "2/2", "success 0.5", "stage 2", "3/4"):
        assert shown in last
