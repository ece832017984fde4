"""Primitives of the store: files that are either whole and durable or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

TEMP_PREFIX = ".tmp-"
PROBE_BYTES = 1 << 16


class StoreFull(OSError):
    """No space or quota left. Earlier commits stay valid."""


def write_temp(folder: Path, data: bytes, *, mode: int = 0o666) -> Path:
    """Write `data` durably under a temporary name in `folder`, and return its path.
    mode: before the umask. Errors: StoreFull.
    """
    return write_pieces(folder, [memoryview(data)], len(data), mode=mode)


def write_pieces(
    folder: Path, pieces: Iterable[memoryview], size: int, *, mode: int = 0o666
) -> Path:
    """Write pieces in order like `write_temp`. size: their bytes, for the error message."""
    path = folder / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        discard(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                error.errno,
                f"no space left for {size} bytes ({os.strerror(error.errno)}); the last commit"
                " stays valid, make room and run again",
                str(folder),
            ) from error
        raise
    return path


@contextlib.contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Raise StoreFull in place of any error inside if `folder` has no space left.

    A server with its database in that folder fails with an error that does not name the full disk.
    Errors: StoreFull; other errors pass unchanged.
    """
    try:
        yield
    except StoreFull:
        raise
    except Exception as error:
        if folder.is_dir():
            try:
                discard(write_temp(folder, bytes(PROBE_BYTES)))
            except StoreFull as full:
                raise full from error
        raise


def create_exclusively(temp: Path, path: Path) -> bool:
    """Link `temp` as `path`, durably, unless that name is taken. Return True if it was linked."""
    try:
        os.link(temp, path)
    except FileExistsError:
        # over NFS a lost reply makes a successful link look refused; the link count is reliable
        if temp.stat().st_nlink != 2:
            return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            advice = "put store.path on a file system that has hard links"
            raise OSError(
                error.errno, f"cannot link a file ({os.strerror(error.errno)}); {advice}", str(path)
            ) from error
        raise
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file atomically and durably; after a crash it has the new or the old content."""
    make_folder(path.parent)
    temporary = write_temp(path.parent, data)
    try:
        temporary.replace(path)
    finally:
        discard(temporary)


def discard(path: Path) -> None:
    path.unlink(missing_ok=True)
