"""Commands end with one plain line and an exit code."""

import signal
import subprocess
import sys

import pytest

from agentgym.config import ConfigError
from agentgym.console.ending import guarded

# window title, cleared screen, hyperlink, bell, C1 sequence introducer, right-to-left override,
# line separator, carriage return
HOSTILE = "ok\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\x\x9b31m\u202ekcab\u2028\rfailed"
STEERING = set("\x1b\x07\x9b\u202e\u2028\r")


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


MANY = """
import sys
from agentgym.console.ending import guarded, say

def command():
    for number in range(100_000):
        say(number)
    return 0

sys.exit(guarded(command))
"""


def test_a_command_whose_reader_is_gone_ends_without_a_word():
    """Run `agentgym plan | head -1`."""
    command = subprocess.Popen(
        [sys.executable, "-c", MANY], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with command:
        assert command.stdout.readline() == b"0\n"
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_a_failure(capsys):
    def command():
        raise BrokenPipeError(32, "Broken pipe")

    assert guarded(command) == 1
    assert capsys.readouterr().err == "failed: BrokenPipeError: [Errno 32] Broken pipe\n"
