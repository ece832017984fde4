"""End of a command: an error becomes one line, the page that explains it and an exit code.
Control characters are escaped.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TextIO

from agentgym.config import ConfigError
from agentgym.pipeline.child import PAGE
from envs.plain import plain

# lines of PAGE and the classes of errors that docs/reference/errors-PAGE.md has sections on
_SECTIONS = """
configuration ConfigError DataError HistoryElsewhere
models HostBusy
store BlobMissing DigestMismatch Fenced LeaseHeld ManifestDamaged ManifestError RecordError
store StoreFull StoreNotHere StoreUnreachable
environments ApiUnreachable EnvError FieldConflict FleetNotReady FleetTripped Forbidden KubeError
environments LostLease NotServed RolloutError
evaluations EvaluationInvalid EvaluationStopped Incomparable NumbersChanged PlayerFailed ResultError
learning AlarmStop EngineMismatch EngineStalled FloatingPointError HostLost TransportBroken
services CellsFailed DvcError LedgerError LedgerUnavailable ModelChanged PlacementError RankLost
services RayJobFailed RayUnreachable StaleRun WorkersLost
"""
PAGES = {
    name: f"errors-{page}"
    for page, *names in map(str.split, _SECTIONS.strip().splitlines())
    for name in names
}
CHECKOUT = Path(__file__).resolve().parents[2]


def guarded(command: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Run a command and return its exit code. An error becomes one line on standard error, and
    another with its page in the documents if it has one.
    Codes: 2 for a ConfigError, 130 if interrupted (SIGTERM acts as Ctrl-C from now on), 141 if the
    reader of standard output is gone, 1 for another error; `show_traceback` prints its traceback.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr, indent=2)
        _say_page(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last commit", file=sys.stderr)
        return 130
    except Exception as error:  # the last resort: the exit code informs the caller
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE  # like any program before `| head`
        if show_traceback:
            say(traceback.format_exc(), file=sys.stderr, end="")
        say(f"failed: {type(error).__name__}: {error}", file=sys.stderr, indent=2)
        _say_page(error)
        return 1


def page_of(error: type[BaseException]) -> str:
    """Return the address of the section on a class of errors or on its nearest documented base; ""
    if there is none. It is a path in a checkout, else the site's address if the package names one.
    """
    for name in (base.__name__ for base in error.__mro__):
        if name == "RuntimeError":  # several pages have sections on it
            return _address("errors", "classes")
        if name in PAGES:
            return _address(PAGES[name], name.lower())
    return ""


def _say_page(error: BaseException) -> None:
    """Print the page of an error. A note that names one comes from the process that failed."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(PAGE)]
    page = page_of(type(error))
    for line in notes or ([f"{PAGE}{page}"] if page else []):
        say(line, file=sys.stderr)


def _address(page: str, anchor: str) -> str:
    path = f"docs/reference/{page}.md"
    for folder in (Path(), CHECKOUT):
        if (folder / path).is_file():
            return f"{folder / path}#{anchor}"
    site = _site()
    return (
        f"{site.rstrip('/')}/{path.removesuffix('.md')}/#{anchor}"
        if site
        else f"{path}#{anchor} in the repository of agentgym-flow"
    )


def _site() -> str:
    """Return the address of the documents in pyproject.toml (project.urls); "" without one."""
    with contextlib.suppress(PackageNotFoundError):
        for line in metadata("agentgym-flow").get_all("Project-URL", []):
            name, _, address = line.partition(", ")
            if name == "Documentation":
                return str(address)
    return ""


def _reader_is_gone() -> bool:
    """Return True if the reader of standard output is gone; then discard all further output."""
    with contextlib.suppress(io.UnsupportedOperation):  # stdout may be no file
        output, poll = sys.stdout.fileno(), select.poll()
        poll.register(output, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            return True
    return False


def say(
    text: object, *, file: TextIO | None = None, end: str = "\n", indent: int | None = None
) -> None:
    """Print text from an untrusted source, with its control characters escaped.
    file: None: standard output. indent: wrap its lines at a terminal's columns, and begin what
    follows with so many spaces; a program that reads the output gets it as it is.
    """
    file, shown = file or sys.stdout, plain(str(text))
    if indent is not None and file.isatty():
        lines = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        shown = "\n".join(map(lines.fill, shown.split("\n")))
    print(shown, file=file, end=end)
