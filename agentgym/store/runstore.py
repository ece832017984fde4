"""The RunStore keeps the commits of steps: the newest manifest alone states a step's progress.

Each (step, key) has its own folder: blobs, named by their sha256 and written first; one manifest
per commit, written last; and a lease that names the one writer.
Back ends store the folders: posix.py, s3.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from agentgym.store.lease import (
    Backend,
    Content,
    Folder,
    Holder,
    Lease,
    LeaseHeld,
    Tenure,
    reason_of,
)
from agentgym.store.manifest import (
    STEP,
    Blob,
    BlobMissing,
    DigestMismatch,
    Manifest,
    ManifestDamaged,
    ManifestError,
    StepWriter,
    decode_commit,
    sha256,
)
from agentgym.store.posix import PosixBackend

logger = logging.getLogger(__name__)

KEY_DIGITS = 16  # digits of a step's key in the name of its folder
FOLDER = re.compile(rf"(?P<step>.+)-(?P<key>[0-9a-f]{{{KEY_DIGITS}}})")


class RunStore:
    """Commits of steps in one back end. Reading needs no lease and takes none."""

    def __init__(self, backend: Backend, *, lease_ttl_s: float) -> None:
        """Open a store. lease_ttl_s: silence (s) after which a holder elsewhere counts as dead."""
        self.root = backend.root
        self.lease_ttl_s = lease_ttl_s
        self._backend = backend

    def head(self, step: str, key: str) -> Manifest | None:
        """Return the head, the newest undamaged manifest; None without commits. Log newer, damaged
        ones. Errors: ManifestError if all are damaged, or one is another step's or of a newer
        schema.
        """
        return _newest(self._folder(step, key), f"{step}-{key}")

    def final(self, step: str, key: str) -> Manifest | None:
        """Return the `head` if the step is done, else None. Errors: those of `head`."""
        head = self.head(step, key)
        return head if head is not None and head.done else None

    def history(self, step: str, key: str, *, after: int = -1) -> list[Manifest]:
        """Return every manifest with seq > after, in order. Errors: ManifestError."""
        return [manifest for commit in self._commits(step, key, after) for manifest in commit]

    def _commits(self, step: str, key: str, after: int = -1) -> list[list[Manifest]]:
        """Return the manifests with seq > after, in order, as one list per commit.
        Errors: ManifestError if one is damaged or another step's.
        """
        folder = self._folder(step, key)
        files = list(folder.commits().items())
        # the last commit that begins at or before `after` may have manifests beyond it
        first = max(0, sum(seq <= after for seq, _ in files) - 1)
        loaded = self._backend.map(
            lambda file: _load(folder, *file, f"{step}-{key}"), files[first:]
        )
        later = [[manifest for manifest in commit if manifest.seq > after] for commit in loaded]
        return [commit for commit in later if commit]

    def heads(self, step: str | None = None, key: str = "") -> list[Manifest]:
        """Return the head of each step and key, oldest first. step: only this step's; key: only
        those whose key begins with it.
        """
        matches = [match for name in self._backend.folders() if (match := FOLDER.fullmatch(name))]
        wanted = [
            match.string
            for match in matches
            if step in (None, match["step"]) and match["key"].startswith(key[:KEY_DIGITS])
        ]
        heads = self._backend.map(lambda name: _newest(self._backend.folder(name), name), wanted)
        known = [head for head in heads if head is not None and head.key.startswith(key)]
        return sorted(known, key=lambda head: head.created_at)

    def marks(self) -> dict[str, str]:
        """Return name of each step's folder -> text that changes with its newest commit; the text
        is empty without commits.
        """

        def mark(name: str) -> str:
            folder = self._backend.folder(name)
            try:
                files = list(folder.commits().values())
                return f"{len(files)} {folder.digest(files[-1])}" if files else ""
            except FileNotFoundError:  # the step is being collected
                return ""

        names = sorted(filter(FOLDER.fullmatch, self._backend.folders()))
        return dict(zip(names, self._backend.map(mark, names), strict=True))

    def read(self, manifest: Manifest, name: str) -> bytes:
        """Return a blob or record, verified. Errors: KeyError, BlobMissing, DigestMismatch."""
        with self._located(manifest, name) as (folder, blob):
            data = folder.read(blob.path)
        self._compare(manifest, name, len(data), lambda: sha256(data))
        return data

    def read_into(self, manifest: Manifest, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a blob or record from byte `start` on.
        The digest is not verified. Errors: KeyError, BlobMissing; EOFError if it ends too early.
        """
        with self._located(manifest, name) as (folder, blob):
            folder.read_into(blob.path, start, buffer)

    def add(self, step: str, key: str, content: Content) -> Blob:
        """Store content and return its Blob, which the holder of the step's lease commits later.
        This call needs no lease. Errors: StoreFull.
        """
        return self._folder(step, key).stream(content)

    def has(self, manifest: Manifest) -> bool:
        """Return True if all blobs of the manifest exist with their sizes; records are ignored."""
        folder = self._folder(manifest.step, manifest.key)
        try:
            return all(folder.size(blob.path) == blob.size for blob in manifest.blobs.values())
        except FileNotFoundError:
            return False

    def verify(self, manifest: Manifest, names: Sequence[str] | None = None) -> None:
        """Read and verify content: these blobs and records, or all (None).
        Errors: BlobMissing, DigestMismatch; KeyError for an unknown name.
        """
        for name in (*manifest.blobs, *manifest.records) if names is None else names:
            with self._located(manifest, name) as (folder, blob):
                digest = functools.partial(folder.digest, blob.path)
                self._compare(manifest, name, folder.size(blob.path), digest)

    def is_collected(self, step: str, key: str) -> bool:
        """Return True if the commits of this step were collected and there is no new one."""
        return self._folder(step, key).collected()

    def num_bytes(self, manifest: Manifest) -> int:
        """Return the bytes of the folder of the manifest's step."""
        return self._folder(manifest.step, manifest.key).num_bytes()

    def holders(self) -> list[Holder]:
        """Return the live holders of leases in this store."""
        return [tenure.holder for tenure in self.tenures().values() if tenure.alive]

    def tenures(self, folders: Iterable[str] | None = None) -> dict[str, Tenure]:
        """Return the last tenure of each step's lease, by the name of the step's folder.
        folders: only these. A step that never had a holder is left out.
        """
        among = self._backend.folders() if folders is None else folders
        names = [name for name in among if FOLDER.fullmatch(name)]
        tenures = self._backend.map(
            lambda name: self._backend.folder(name).tenure(self.lease_ttl_s), names
        )
        pairs = zip(names, tenures, strict=True)
        return {name: tenure for name, tenure in pairs if tenure is not None}

    def collect(self, manifest: Manifest) -> None:
        """Remove all commits and content of the step and key whose head this manifest is.
        Errors: LeaseHeld; ValueError if it is not the head.
        """
        folder = self._folder(manifest.step, manifest.key)
        with self._held(folder, manifest.step) as lease:
            if self.head(manifest.step, manifest.key) != manifest:
                raise ValueError(f"{folder.place} has another commit now; list again")
            lease.collect()

    def finish_collecting(self) -> int:
        """Finish every killed `collect`, except of leased steps. Return the number finished."""
        count = 0
        for match in filter(None, map(FOLDER.fullmatch, self._backend.folders())):
            folder = self._backend.folder(match.string)
            if not (folder.collected() and folder.has_content()):
                continue
            with contextlib.suppress(LeaseHeld), self._held(folder, match["step"]) as lease:
                if folder.collected():  # else another process began the step anew meanwhile
                    lease.collect()
                    count += 1
        return count

    @contextlib.contextmanager
    def _held(self, folder: Folder, step: str, parents: Sequence[str] = ()) -> Iterator[Lease]:
        """Yield the step's lease; release it on any exit. Errors: LeaseHeld."""
        lease = folder.acquire(self.lease_ttl_s, f"step {step} ({folder.place})", parents)
        reason = ""
        try:
            yield lease
        except BaseException as error:
            reason = reason_of(error)
            raise
        finally:
            lease.release(reason)

    @contextlib.contextmanager
    def open(self, step: str, key: str, parents: Sequence[str] = ()) -> Iterator[StepWriter]:
        """Finish a `collect`, drop damaged newest commits and yield a writer; release its lease on
        any exit.
        parents: digests of the manifests it builds on, which are not collected meanwhile.
        Errors: LeaseHeld, ManifestError; ValueError for a step or key of another form.
        """
        if not STEP.fullmatch(step):
            raise ValueError(
                f"step name {step!r} must be lower-case words joined by dashes, for example stage-1"
            )
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError(
                f"key {key!r} of step {step} must be 64 hex digits; make it with step_key"
            )
        folder = self._folder(step, key)
        with self._held(folder, step, parents) as lease:
            lease.begin_anew()
            head = self.head(step, key)
            if head is not None and head.seq < max(folder.commits()):  # later ones are damaged
                lease.drop(head.seq + 1)
            yield StepWriter(folder, lease, step, key, self._commits(step, key))

    def _folder(self, step: str, key: str) -> Folder:
        return self._backend.folder(folder_name(step, key))

    def _locate(self, manifest: Manifest, name: str) -> tuple[Folder, Blob]:
        blob = manifest.blobs.get(name) or manifest.records.get(name)
        if blob is None:
            known = ", ".join([*manifest.blobs, *manifest.records]) or "nothing"
            raise KeyError(
                f"step {manifest.step} commit {manifest.seq} has no {name!r}; it has {known}"
            )
        return self._folder(manifest.step, manifest.key), blob

    @contextlib.contextmanager
    def _located(self, manifest: Manifest, name: str) -> Iterator[tuple[Folder, Blob]]:
        """Yield folder and Blob of a name. Errors: KeyError; BlobMissing if the file is absent."""
        folder, blob = self._locate(manifest, name)
        try:
            yield folder, blob
        except FileNotFoundError:
            raise self._missing(manifest, name) from None

    def _compare(self, manifest: Manifest, name: str, size: int, digest: Callable[[], str]) -> None:
        """Raise DigestMismatch unless `size` and `digest()` are those of the blob or record `name`.
        `digest` is called only if the size is right.
        """
        folder, blob = self._locate(manifest, name)
        if size != blob.size:
            expected, came = f"{blob.size} bytes", f"{size} bytes"
        elif (actual := digest()) != blob.digest:
            expected, came = f"sha256 {blob.digest}", f"sha256 {actual}"
        else:
            return
        raise DigestMismatch(
            f"{name} of step {manifest.step} commit {manifest.seq} is damaged:"
            f" {folder.place}/{blob.path}: expected {expected}, got {came}; restore that"
            f" file, or delete {folder.place} to run the step again"
        )

    def _missing(self, manifest: Manifest, name: str) -> BlobMissing:
        folder, blob = self._locate(manifest, name)
        message = (
            f"{name} of step {manifest.step} commit {manifest.seq} is not there:"
            f" {folder.place}/{blob.path}"
        )
        if folder.collected():
            return BlobMissing(f"{message}: `agentgym gc` collected it; run the step again")
        head = self.head(manifest.step, manifest.key)
        if head is not None and head.seq > manifest.seq and name in manifest.blobs:
            return BlobMissing(
                f"{message}; only the newest commits keep their blobs (store.keep_checkpoints), use"
                f" commit {head.seq}"
            )
        return BlobMissing(
            f"{message}; restore that file, or delete {folder.place} to run the step again"
        )


def store_at(root: str | Path, *, lease_ttl_s: float) -> RunStore:
    """Return the store in a folder, which need not exist yet, or at `s3://bucket/prefix`, whose
    bucket must exist. lease_ttl_s: see RunStore. No request is sent yet.
    Errors: ConfigError if S3 cannot be used with this setup.
    """
    backend: Backend
    if str(root).startswith("s3://"):
        from agentgym.store.s3 import s3_backend

        backend = s3_backend(str(root))
    else:
        backend = PosixBackend(Path(root))
    return RunStore(backend, lease_ttl_s=lease_ttl_s)


class StoreNotHere(ValueError):
    """A store in a folder that this machine does not see."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Root and lease time with which another process opens the same store."""

    root: str  # a folder, or s3://bucket/prefix
    lease_ttl_s: float

    @classmethod
    def of(cls, store: RunStore) -> Self:
        root = store.root
        if not root.startswith("s3://"):
            root = str(Path(root).absolute())  # another process has another working directory
        return cls(root, store.lease_ttl_s)

    def open(self) -> RunStore:
        """Open the store. Errors: ConfigError if S3 cannot be used with this setup."""
        return store_at(self.root, lease_ttl_s=self.lease_ttl_s)

    def visit(self, step: str, key: str) -> RunStore:
        """Open the store for a step whose writer is in another process.
        Errors: StoreNotHere if the step's folder is not visible on this machine.
        """
        folder = Path(self.root) / "steps" / folder_name(step, key)
        if not self.root.startswith("s3://") and not folder.is_dir():
            raise StoreNotHere(
                f"the store {self.root} is not on {socket.gethostname()}; every node of the"
                " cluster must see it: give store.path a folder that all share, or set store.uri"
            )
        return self.open()


class Writable(Protocol):
    """A snapshot of weights and optimizer states, in the memory of one or more processes."""

    @property
    def size(self) -> int:
        """Size of the snapshot in bytes."""

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Write into a step's folder. Return name -> blob for the commit. Errors: StoreFull."""


def folder_name(step: str, key: str) -> str:
    """Return the name of the folder with a step's commits; FOLDER parses it."""
    return f"{step}-{key[:KEY_DIGITS]}"


def _newest(folder: Folder, owner: str) -> Manifest | None:
    """Return the newest undamaged manifest, None without commits; log newer, damaged ones.
    owner: see `_load`. Errors: ManifestError if all are damaged, or of `_load`.
    """
    commits = folder.commits()
    while commits:
        seq, name = commits.popitem()
        try:
            return _load(folder, seq, name, owner)[-1]
        except ManifestDamaged as error:
            if not commits:
                raise
            logger.warning("%s; going by the commit before, %d", error, max(commits))
    return None


def _load(folder: Folder, seq: int, name: str, owner: str) -> list[Manifest]:
    """Read one commit's file, check that it is the expected one, and return its manifests in order.

    seq: number that the first manifest must have. name: of the file, below the folder.
    owner: `STEP-KEY` that every manifest must belong to, the key whole or cut as in folder names.
    Errors: ManifestError if the file is damaged, or a manifest is another step's or misnumbered.
    """
    manifests = decode_commit(folder.read(name), where=f"{folder.place}/{name}")
    for manifest in manifests:
        if owner not in (
            f"{manifest.step}-{manifest.key}",
            folder_name(manifest.step, manifest.key),
        ):
            came = f"step {manifest.step} with key {manifest.key}"
            raise ManifestError(f"{folder.place} holds {came}, expected {owner}; move it away")
    numbers = [manifest.seq for manifest in manifests]
    if numbers != list(range(seq, seq + len(numbers))):
        raise ManifestError(
            f"{folder.place}/{name} holds commit {numbers[0]}: commits were given other places;"
            " restore the folder from a copy"
        )
    return manifests
