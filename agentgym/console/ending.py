"""End of a command: an error becomes one line and an exit code, control characters are escaped."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from agentgym.config import ConfigError
from envs.plain import plain


def guarded(command: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Run a command and return its exit code. An error becomes one line on standard error.
    Codes: 2 for a ConfigError, 130 if interrupted (SIGTERM acts as Ctrl-C from now on), 141 if the
    reader of standard output is gone, 1 for another error; `show_traceback` prints its traceback.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last commit", file=sys.stderr)
        return 130
    except Exception as error:  # the last resort: the exit code informs the caller
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE  # like any program before `| head`
        if show_traceback:
            say(traceback.format_exc(), file=sys.stderr, end="")
        say(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _reader_is_gone() -> bool:
    """Return True if the reader of standard output is gone; then discard all further output."""
    with contextlib.suppress(io.UnsupportedOperation):  # stdout may be no file
        output, poll = sys.stdout.fileno(), select.poll()
        poll.register(output, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            return True
    return False


def say(text: object, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text from an untrusted source, with its control characters escaped.
    file: None: standard output.
    """
    print(plain(str(text)), file=file or sys.stdout, end=end)
