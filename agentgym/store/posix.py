"""The RunStore on a POSIX file system: files that are created whole and never changed, and the
calls that write such files.

root/steps/<step>-<key[:16]>/
    leases/<epoch>.json   the holder; never deleted, its modification time is the heartbeat
    blobs/<sha256>        content; large content of several keys of a step is one hard-linked file
    manifests/<seq>.json  one per commit, created exclusively, numbered by its first manifest
    collected             if present, blobs and manifests were removed or are being removed
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from agentgym.store.lease import Content, Fenced, Holder, Lease, Tenure, digest_of
from agentgym.store.manifest import Blob, decode_commit

T = TypeVar("T")
U = TypeVar("U")
TEMP_PREFIX = ".tmp-"
PROBE_BYTES = 1 << 16
COLLECTED = "collected"  # while this file exists, a step has no commits
SHARED_BYTES = 1 << 20  # content of this size or more is stored once for all keys of a step
MANIFEST = re.compile(r"(?P<seq>\d{6,})\.json")


class PosixBackend:
    """Storage of all steps in one folder, with a folder for each step."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._steps = Path(root) / "steps"

    def folders(self) -> list[str]:
        return [path.name for path in self._steps.iterdir()] if self._steps.is_dir() else []

    def folder(self, name: str) -> PosixFolder:
        return PosixFolder(self._steps / name)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        return [function(item) for item in items]


class PosixFolder:
    """One step's folder on a file system."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._path = path

    def commits(self) -> dict[int, str]:
        if self.collected():
            return {}
        try:
            names = os.listdir(self._path / "manifests")
        except FileNotFoundError:
            return {}
        matches = filter(None, map(MANIFEST.fullmatch, names))
        return dict(sorted((int(m["seq"]), f"manifests/{m.string}") for m in matches))

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        with (self._path / name).open("rb", buffering=0) as file:
            file.seek(start)
            while buffer:
                count = file.readinto(buffer)
                if not count:
                    raise EOFError(f"{self._path / name} ends too early")
                buffer = buffer[count:]

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def digest(self, name: str) -> str:
        return _sha256(self._path / name)

    def blobs(self) -> set[str]:
        names = os.listdir(self._path / "blobs")
        return {name for name in names if not name.startswith(TEMP_PREFIX)}

    def put(self, blob: Blob, data: bytes) -> None:
        if not self._has(blob):
            path = self._path / "blobs" / blob.digest
            write_temp(path.parent, data).rename(path)

    def stream(self, content: Content) -> Blob:
        """Write content, while another thread hashes it, to a file that is removed again if the
        content is stored already. Return its Blob. Errors: StoreFull.
        """
        with ThreadPoolExecutor(1) as pool:
            hashing = pool.submit(digest_of, content)
            temp = write_pieces(self._path / "blobs", content.pieces(), content.size)
        try:
            blob = Blob(digest=hashing.result(), size=content.size)
            if not self._has(blob):
                temp.rename(temp.with_name(blob.digest))
        finally:
            discard(temp)
        return blob

    def _has(self, blob: Blob) -> bool:
        """Return True if the content is stored whole. If large content is in the folder of another
        key of this step, hard-link it into this folder and return True.
        """
        path = self._path / "blobs" / blob.digest
        step, _, _ = self._path.name.rpartition("-")
        others = self._path.parent.glob(f"{step}-*/blobs/{blob.digest}")
        for candidate in (path, *(others if blob.size >= SHARED_BYTES else ())):
            try:
                size = candidate.stat().st_size
                is_whole = size == blob.size and _sha256(candidate) == blob.digest
                if is_whole and candidate != path:
                    _link(candidate, path)
            except OSError:  # pruned meanwhile, unreadable, or at its limit of hard links
                continue
            if is_whole:
                return True
        return False

    def remove(self, digest: str) -> None:
        discard(self._path / "blobs" / digest)

    def collected(self) -> bool:
        return (self._path / COLLECTED).exists()

    def num_bytes(self) -> int:
        stats = [path.stat() for path in self._path.rglob("*") if path.is_file()]
        return sum(stat.st_size // stat.st_nlink for stat in stats)

    def has_content(self) -> bool:
        return any(any((self._path / name).iterdir()) for name in ("manifests", "blobs"))

    def tenure(self, ttl_s: float) -> Tenure | None:
        leases = self._path / "leases"
        try:
            epoch = _newest_epoch(leases)
            if not epoch:
                return None
            path = _lease(leases, epoch)
            holder, silent_s = _read_holder(path), time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            reason = _released(leases, epoch).read_text(encoding="utf-8")
        except FileNotFoundError:
            return Tenure(holder, holder.is_alive(silent_s, ttl_s=ttl_s), None)
        return Tenure(holder, False, reason)

    def acquire(self, ttl_s: float, what: str, parents: Sequence[str] = ()) -> Lease:
        for name in ("leases", "blobs", "manifests"):
            make_folder(self._path / name)
        leases = self._path / "leases"
        while True:
            epoch = _newest_epoch(leases)
            me = Holder.me(epoch + 1, parents)
            # FileNotFoundError: the live holder swept the temporary file away
            with (
                temporary(leases, json.dumps(asdict(me)).encode()) as temp,
                contextlib.suppress(FileNotFoundError),
            ):
                if epoch and not _released(leases, epoch).exists():
                    last = _lease(leases, epoch)
                    # heartbeats carry the file system's clock, and so does the temporary file
                    silent_s = temp.stat().st_mtime - last.stat().st_mtime
                    _read_holder(last).refuse_if_alive(silent_s, ttl_s=ttl_s, what=what)
                if create_exclusively(temp, _lease(leases, me.epoch)):
                    return PosixLease(self._path, me, ttl_s, what)


class PosixLease(Lease):
    """A lease in a file of its own, whose modification time is the heartbeat."""

    def __init__(self, path: Path, holder: Holder, ttl_s: float, what: str) -> None:
        self._path = path
        self._leases = path / "leases"
        super().__init__(holder, ttl_s, what)

    def check(self) -> None:
        epoch = _newest_epoch(self._leases)
        if epoch > self.holder.epoch:
            raise self._fenced_by(_read_holder(_lease(self._leases, epoch)))

    def commit(self, first: int, last: int, data: bytes) -> None:
        sync_folder(self._path / "blobs")
        path = self._path / "manifests" / f"{first:06d}.json"
        with temporary(path.parent, data) as temp:
            self.check()
            if not create_exclusively(temp, path):
                committed = decode_commit(path.read_bytes(), where=str(path))[-1]
                raise Fenced(
                    f"{self._what}: commit {first} was already made under epoch"
                    f" {committed.epoch}, not by this process ({self.holder.pid}, epoch"
                    f" {self.holder.epoch}); stop, and run the step again to continue from it"
                )

    def drop(self, first: int) -> None:
        folder = self._path / "manifests"
        numbers = [int(name[:-5]) for name in os.listdir(folder) if MANIFEST.fullmatch(name)]
        for seq in sorted(numbers, reverse=True):  # newest first: a kill leaves a valid history
            if seq >= first:
                self.check()
                path = folder / f"{seq:06d}.json"
                path.rename(path.with_suffix(f".dropped-{self.holder.epoch}"))
        sync_folder(folder)

    def collect(self) -> None:
        self.check()
        with temporary(self._path, b"by `agentgym gc`\n") as temp:
            create_exclusively(temp, self._path / COLLECTED)
        self._empty()

    def begin_anew(self) -> None:
        if (self._path / COLLECTED).exists():
            self._empty()
            self.check()
            discard(self._path / COLLECTED)
            sync_folder(self._path)

    def _empty(self) -> None:
        for name in ("manifests", "blobs"):
            for path in (self._path / name).iterdir():
                self.check()
                discard(path)
            sync_folder(self._path / name)

    def sweep(self) -> int:
        litter = [
            path
            for name in ("leases", "blobs", "manifests")
            for path in (self._path / name).glob(f"{TEMP_PREFIX}*")
        ]
        for path in litter:
            self.check()  # a newer holder's may be among them
            discard(path)
        return len(litter)

    def _beat(self) -> None:
        os.utime(_lease(self._leases, self.holder.epoch))

    def _give_back(self, reason: str) -> None:
        with temporary(self._leases, reason.encode("utf-8", "replace")) as temp:
            create_exclusively(temp, _released(self._leases, self.holder.epoch))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(content: Path, path: Path) -> None:
    """Hard-link `content` as `path`, replacing a file there."""
    temp = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")
    os.link(content, temp)
    try:
        temp.rename(path)
    finally:
        discard(temp)  # still there if `path` named this content already


def _newest_epoch(leases: Path) -> int:
    """Return the newest epoch, 0 without a lease file. Errors: FileNotFoundError for the folder."""
    names = (name for name in os.listdir(leases) if re.fullmatch(r"\d+\.json", name))
    return max((int(name[:-5]) for name in names), default=0)


def _lease(leases: Path, epoch: int) -> Path:
    return leases / f"{epoch:06d}.json"


def _released(leases: Path, epoch: int) -> Path:
    return leases / f"{epoch:06d}.released"


def _read_holder(path: Path) -> Holder:
    return Holder.from_tree(json.loads(path.read_bytes()))


class StoreFull(OSError):
    """No space or quota left. Earlier commits stay valid."""


def write_temp(folder: Path, data: bytes, *, mode: int = 0o666) -> Path:
    """Write `data` to a new temporary file in `folder` and sync it; return its path, for the caller
    to rename, link or discard. The name is durable only after `sync_folder`. An OSError leaves no
    file.
    mode: permissions before the umask.
    Errors: StoreFull; other OSErrors pass.
    """
    return write_pieces(folder, [memoryview(data)], len(data), mode=mode)


@contextlib.contextmanager
def temporary(folder: Path, data: bytes, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield the file of `write_temp` and discard it after the block, unless it was renamed."""
    path = write_temp(folder, data, mode=mode)
    try:
        yield path
    finally:
        discard(path)


def write_pieces(
    folder: Path, pieces: Iterable[memoryview], size: int, *, mode: int = 0o666
) -> Path:
    """Write pieces in order to one file, see `write_temp`. size: bytes, for the error message."""
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
    """Raise StoreFull in place of an error in the `with` block if `folder` has no space left.

    A server with its database in that folder fails with an error that does not name the full disk.
    The test writes and removes a file of PROBE_BYTES. Without `folder`, errors are unchanged.
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
    """Hard-link `temp` as `path`, durably, unless `path` exists. Return True if it was linked.
    Errors: OSError, for example on a file system without hard links.
    """
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


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Create or replace a file atomically and durably, with its folder if that is missing.
    mode: permissions before the umask. Errors: StoreFull.
    """
    make_folder(path.parent)
    with temporary(path.parent, data, mode=mode) as temp:
        temp.replace(path)


def discard(path: Path) -> None:
    path.unlink(missing_ok=True)
