"""Ctrl-C that cannot get lost: some libraries swallow the exception where it strikes them, so it is also written down."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_asked = threading.Event()


def listen() -> None:
    """From now on SIGINT and SIGTERM raise KeyboardInterrupt, and `check` does once more where that was not heard.

    For the main thread. An ignored SIGINT stays ignored.
    """
    _asked.clear()
    signal.signal(signal.SIGTERM, _handle)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _handle)


def check() -> None:
    """Errors: KeyboardInterrupt where one was asked for since `listen`, in the main thread."""
    if _asked.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def heard() -> None:
    """The interrupt has done its work."""
    _asked.clear()


def _handle(number: int, frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt
