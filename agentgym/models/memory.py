"""The host's memory while a pretrained model is in it."""

from __future__ import annotations

import ctypes
from typing import Any

# Of glibc's mallopt. Its own threshold grows with the blocks that are freed; a fixed one does not
# let `return_memory` miss a block.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE, MOST = 32 << 20, 2**31 - 1  # bytes: the largest that M_MMAP_THRESHOLD takes; of an int


def keep_blocks() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB, in any thread, until `return_memory`.

    A page that comes fresh from the system costs microseconds: with every block of 128 KiB given
    back at once, attention to 400 cached tokens took twice as long. No effect under another C
    library.
    """
    for option, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, MOST), (M_ARENA_MAX, 1)):
        _call("mallopt", option, value)


def return_memory() -> None:
    """Give every free page back to the system: what follows needs other blocks.

    A process that had trained SmolLM2-135M held 3 GiB that nothing used.
    """
    _call("malloc_trim", 0)


def _call(name: str, *values: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*values)
