"""Outlives a browser's owner, however that ends, by the seconds it takes to end what is left and
to remove its folder.

Run as `python -I -S keeper.py FOLDER` with the owner's pipe as standard input, which may say the
browser's process number; needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0  # for an orderly end of what still runs
END_S = 10.0  # after which a folder that will not go is left


def left(folder: str, browser: tuple[int, int] | None) -> list[int]:
    """Processes of this user that name the folder on their command line or in their TMPDIR, and
    all of the browser's session.

    browser: its process number and when it started. What it starts may hide its environment.
    """
    found, members, is_reused = [], [], False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                state, session, started = stat(pid)
                is_reused = is_reused or (
                    browser is not None and pid == browser[0] and started != browser[1]
                )
                if state == "Z":
                    continue
                if names(pid, folder):
                    found.append(pid)
                elif browser is not None and session == browser[0]:
                    members.append(pid)
    return found if is_reused else found + members


def stat(pid: int) -> tuple[str, int, int]:
    """State, session and start time in clock ticks. Errors: OSError where it is gone."""
    # before it stands a name of any bytes
    words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), int(words[3]), int(words[19])


def names(pid: int, folder: str) -> bool:
    """Not where it is gone or does not let us look."""
    with contextlib.suppress(OSError):
        return any(
            folder.encode() in Path(f"/proc/{pid}/{file}").read_bytes()
            for file in ("cmdline", "environ")
        )
    return False


def checked(pid: int, folder: str) -> tuple[int, int] | None:
    """(number, start time) of a process that leads its session and names the folder; a browser
    behind a wrapper may give another number.
    """
    with contextlib.suppress(OSError):
        _, session, started = stat(pid)
        if session == pid and names(pid, folder):
            return pid, started
    return None


def main(folder: str) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    browser = None
    while said := os.read(0, 4096):
        browser = checked(int(said), folder)
    began = time.monotonic()
    while time.monotonic() - began < END_S:
        running = left(folder, browser)
        if running and time.monotonic() - began > GRACE_S:
            for pid in running:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not running:
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                return
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
