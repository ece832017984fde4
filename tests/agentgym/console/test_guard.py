"""How a command ends: one plain line and an exit code."""

import pytest

from agentgym.config import ConfigError
from agentgym.console.guard import guarded

# a window's title, a cleared screen, a link, a bell, C1's own sequence begin, a line that is read
# backwards, a line written over
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
