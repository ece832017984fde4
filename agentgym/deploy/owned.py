"""Child processes that cannot outlive the one that started them, however it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
LOG_LINES = 15
LEAST_SPACE = 1 << 16  # bytes
ORPHAN_GRACE_S = 3.0


@contextlib.contextmanager
def owned_process(
    command: Sequence[str], *, log_path: Path, env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child in a process group of its own, yield it, and end it on exit.
    log_path: gets its output appended. env: variables in addition to this process's. pass_fds:
    open file descriptors that it inherits.
    Its stdin is a pipe that only this process holds: a child that calls `end_with_owner`, or
    watches stdin itself, also ends when this process is killed.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal reaches the owner alone, which then ends the child cleanly
            start_new_session=True,
            env={**os.environ, **env},
            pass_fds=tuple(pass_fds),
        )
    try:
        yield process
    finally:
        _stop(process)


def finished_process(
    command: Sequence[str], *, timeout_s: float, given: str = "", env: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its result. given: its stdin. env: as `owned_process`.
    Errors: subprocess.TimeoutExpired; FileNotFoundError if there is no such command.
    """
    how: dict[str, Any] = {
        "capture_output": True,
        "encoding": "utf-8",
        "env": {**os.environ, **env},
    }
    return subprocess.run(command, input=given, timeout=timeout_s, check=False, **how)


def tail(log_path: Path) -> str:
    """Return the last LOG_LINES lines of a child's output after a heading, for an error message; or
    a note that the log is empty, with the remedy if its disk is full.
    """
    lines = log_path.read_text(errors="replace", encoding="utf-8").splitlines()[-LOG_LINES:]
    if lines:
        return "\n".join([f"the last lines of {log_path}:", *lines])
    is_full = shutil.disk_usage(log_path.parent).free < LEAST_SPACE
    full = "; no space left on its disk: free some, and give the same command again"
    return f"{log_path} is empty{full if is_full else ''}"


def end_with_owner(grace_s: float = ORPHAN_GRACE_S) -> None:
    """Start a thread that ends this child process once its stdin is closed: by SIGTERM, and by
    SIGKILL after grace_s seconds. If it leads its process group, the whole group gets the signals.
    """

    def send(number: signal.Signals) -> None:
        if os.getpgrp() == os.getpid():
            os.killpg(0, number)
        else:
            os.kill(os.getpid(), number)

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would break the interpreter's shutdown
            pass
        send(signal.SIGTERM)
        threading.Event().wait(grace_s)
        send(signal.SIGKILL)

    threading.Thread(target=watch, name="owner", daemon=True).start()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the child's stdin and wait; if it hangs, send its group SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(STOP_TIMEOUT_S)
            break
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end; sending %s", process.pid, number.name)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    else:
        process.wait(STOP_TIMEOUT_S)
