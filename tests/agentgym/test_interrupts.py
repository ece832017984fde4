"""An interrupt that a library swallows still ends the command, after the next commit."""

import contextlib
import os
import signal

import pytest

from agentgym import interrupts
from agentgym.cli import guarded


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupts.heard()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_swallowed_interrupt_is_raised_again_at_the_next_check(handlers, number, capsys):
    reached = []

    def command():
        with contextlib.suppress(KeyboardInterrupt):  # as some import does
            os.kill(os.getpid(), number)
            raise AssertionError("the signal raises at once")
        reached.append("goes on")
        interrupts.check()
        raise AssertionError("it was not heard")

    assert guarded(command) == 130
    assert reached == ["goes on"]
    assert "interrupted" in capsys.readouterr().err
    interrupts.check()  # once heard, it is over


def test_without_an_interrupt_nothing_is_raised(handlers):
    interrupts.listen()
    interrupts.check()
