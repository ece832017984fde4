"""Outlives a browser's owner, however that ends, by the seconds it takes to end what is left and to remove its folder.

Run as `python -I -S keeper.py FOLDER` with the owner's pipe as standard input, which may say the browser's process number; needs only the
standard library.
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


def left(folder: str, browsers: set[int]) -> list[int]:
    """Processes of this user that name the folder on their command line or in their TMPDIR, and all of the browsers' sessions.

    browsers: process numbers; a browser leads its session, and what it starts may hide its environment. Those found are added.
    """
    found, sessions = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            pid = int(entry.name)
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state == "Z":
                    continue
                sessions[pid] = int(session)
                if folder.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(pid)
    browsers.update(pid for pid in found if sessions[pid] == pid)
    return [*found, *(pid for pid, session in sessions.items() if session in browsers and pid not in found)]


def main(folder: str) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    said = b"".join(iter(lambda: os.read(0, 4096), b""))
    browsers = {int(word) for word in said.split()}
    began = time.monotonic()
    while time.monotonic() - began < END_S:
        running = left(folder, browsers)
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
