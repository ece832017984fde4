"""Progress is a bar on a terminal and an occasional line elsewhere."""

import io
import re
import subprocess
import sys

import pytest
from rich.progress import Progress
from rich.table import Table

from agentgym.console import progress
from agentgym.console.progress import Bars, PlainConsole


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


# window title, cleared screen, hyperlink, bell, C1 sequence introducer, right-to-left override,
# line separator, carriage return
HOSTILE = "ok\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\x\x9b31m\u202ekcab\u2028\rfailed"


def test_tables_and_bars_keep_their_colours_and_nobody_elses():
    stream = io.StringIO()
    console = PlainConsole(file=stream, force_terminal=True, width=300, color_system="truecolor")
    table = Table()
    table.add_column("name")
    table.add_row(HOSTILE)
    console.print("[bold red]mine[/bold red]", table, HOSTILE)
    with Progress(console=console) as bars:
        bars.add_task(HOSTILE, total=1)
    shown = stream.getvalue()
    assert "\x1b[1;31mmine" in shown
    assert "\\x1b]0;owned" in re.sub("\x1b\\[[0-9;]*m", "", shown)
    for sequence in ("\x1b]0;owned", "\x1b]8;", "\x9b", "\u202e", "\x07"):
        assert sequence not in shown


def test_a_servers_refusal_is_plain():
    done = subprocess.run(
        [sys.executable, "-m", "envs", "serve", "x\x1b[2J"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
