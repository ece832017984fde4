"""The host's memory while a pretrained model is in it."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, LARGE = -3, 128 << 10  # of glibc's mallopt; bytes


def return_large_blocks() -> None:
    """Let glibc give blocks of 128 KiB and more back to the system as soon as they are freed.

    Its threshold starts there and grows to 32 MiB with the blocks that are freed: a process that
    had trained SmolLM2-135M held 3 GiB that nothing used. No effect under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
