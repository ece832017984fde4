"""Cleanup process of a browser: after the browser's owner has ended in any way, it ends the
remaining processes and removes their folder.

Run it as `python -I -S keeper.py FOLDER` with a pipe from the owner as standard input, over which
the owner may send the browser's process id. It needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0  # then running processes are killed
END_S = 10.0  # then a folder that cannot be removed is left


def left(folder: str, browser: tuple[int, int] | None) -> list[int]:
    """Return the ids of the other living processes that name the folder on their command line or in
    their environment, and of those of the browser's session, whose environment may be unreadable.

    browser: process id and start time. If another process has this id by now, its session does not
    count.
    """
    named, members, is_reused = [], [], False
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
                    named.append(pid)
                elif browser is not None and session == browser[0]:
                    members.append(pid)
    return named if is_reused else named + members


def stat(pid: int) -> tuple[str, int, int]:
    """Return state, session id and start time (clock ticks) of a process. Errors: OSError."""
    # the name before the last bracket may contain any bytes
    words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), int(words[3]), int(words[19])


def names(pid: int, folder: str) -> bool:
    """Return True if the process's command line or environment contains the folder's path.
    False if it is gone or unreadable.
    """
    with contextlib.suppress(OSError):
        return any(
            folder.encode() in Path(f"/proc/{pid}/{file}").read_bytes()
            for file in ("cmdline", "environ")
        )
    return False


def checked(pid: int, folder: str) -> tuple[int, int] | None:
    """Return (id, start time) of a process that leads its session and names the folder, else None.
    This rejects a wrong id, which for example a browser behind a wrapper may report.
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
    while message := os.read(0, 4096):
        browser = checked(int(message), folder)
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
