"""Text that came from elsewhere steers no terminal, on every way it takes there."""

import io
import re
import subprocess
import sys

from rich.progress import Progress
from rich.table import Table

from agentgym.console.terminal import PlainConsole

# a window's title, a cleared screen, a link, a bell, C1's own sequence begin, a line that is read
# backwards, a line written over
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
