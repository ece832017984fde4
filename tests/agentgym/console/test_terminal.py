"""Text that came from elsewhere steers no terminal, on every way it takes there."""

import io
import logging
import re
import subprocess
import sys

import pytest
from rich.progress import Progress
from rich.table import Table

from agentgym.config import ConfigError
from agentgym.console.guard import guarded
from agentgym.console.terminal import PlainConsole
from envs.plain import PlainFormatter, plain

# a window's title, a cleared screen, a link, a bell, C1's own sequence begin, a line that is read
# backwards, a line written over
HOSTILE = "ok\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\x\x9b31m\u202ekcab\u2028\rfailed"
STEERING = set("\x1b\x07\x9b\u202e\u2028\r")


def assert_harmless(shown):
    assert not STEERING & set(shown), shown
    assert "\\x1b]0;owned\\x07" in shown.replace("\n", "")
    assert "\\u202ekcab" in shown.replace("\n", "")


def test_steering_is_spelled_out_and_text_of_any_language_stays():
    assert_harmless(plain(HOSTILE))
    for text in ("两个红球\n\tdéjà vu 😀", "שלום עולם", "a\u200db"):
        assert plain(text) == text
    assert plain("one\r\ntwo") == "one\ntwo"
    assert plain("\x1b") == "\\x1b"
    assert plain("\ud800").encode() == b"\\ud800"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError(HOSTILE), 2), (RuntimeError(HOSTILE), 1), (OSError(5, HOSTILE), 1)],
)
@pytest.mark.parametrize("show_traceback", [False, True])
def test_a_commands_error_is_plain(capsys, error, code, show_traceback):
    def command():
        raise error

    assert guarded(command, show_traceback=show_traceback) == code
    assert not STEERING & set(capsys.readouterr().err)


def test_a_log_line_and_its_traceback_are_plain():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    record = logging.LogRecord("x", logging.WARNING, "", 0, "server: %s", (HOSTILE,), None)
    handler.handle(record)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    handler.handle(record)
    assert_harmless(stream.getvalue())
    assert "Traceback" in stream.getvalue()


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
