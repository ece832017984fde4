"""The RunStore on a POSIX file system: progress has one owner, the newest committed manifest.

    root/steps/<step>-<key[:16]>/leases/<epoch>.json      who may write (see lease.py)
                                 blobs/<sha256>           content, written before the manifest that names it
                                 manifests/<seq>.json     one per commit, created exclusively, written last

Nothing is changed in place, so another back end needs immutable objects and one exclusive creation, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentgym.store.files import TEMP_PREFIX, create_exclusively, discard, make_folder, sync_folder, write_temp
from agentgym.store.lease import Fenced, Lease
from agentgym.store.manifest import Blob, Manifest, ManifestError

STEP = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FOLDER = re.compile(r"(?P<step>.+)-(?P<key>[0-9a-f]{16})")
MANIFEST = re.compile(r"(?P<seq>\d{6,})\.json")


class DigestMismatch(ValueError):
    """Stored content is not what was committed."""


class BlobMissing(LookupError):
    """Content a manifest names is not there: pruned, or lost."""


class RunStore:
    """Commits of steps under `root`. Reading needs no lease and takes none."""

    def __init__(self, root: Path, *, lease_ttl_s: float) -> None:
        """lease_ttl_s: a holder this process cannot look at (another host) counts as dead after so many silent seconds."""
        self.root = Path(root)
        self.lease_ttl_s = lease_ttl_s

    def head(self, step: str, key: str) -> Manifest | None:
        """The newest commit. Errors: ManifestError."""
        seqs = self._seqs(self._folder(step, key))
        return self._load(step, key, seqs[-1]) if seqs else None

    def final(self, step: str, key: str) -> Manifest | None:
        """The head, where the step is done."""
        head = self.head(step, key)
        return head if head is not None and head.done else None

    def history(self, step: str, key: str, *, after: int = -1) -> list[Manifest]:
        """Every commit with seq > after, in order."""
        return [self._load(step, key, seq) for seq in self._seqs(self._folder(step, key)) if seq > after]

    def keys(self, step: str) -> list[Manifest]:
        """The head of every key this step name was ever committed under, oldest first."""
        return self._heads(step)

    def heads(self) -> list[Manifest]:
        """The head of every step and key, oldest first."""
        return self._heads(None)

    def read(self, manifest: Manifest, name: str) -> bytes:
        """Verified content of a blob or record. Errors: KeyError, BlobMissing, DigestMismatch."""
        path, blob = self._locate(manifest, name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._missing(manifest, name) from None
        self._compare(manifest, name, len(data), hashlib.sha256(data).hexdigest() if len(data) == blob.size else "")
        return data

    def verify(self, manifest: Manifest) -> None:
        """Read all its content once. Errors: BlobMissing, DigestMismatch."""
        for name in (*manifest.blobs, *manifest.records):
            path, blob = self._locate(manifest, name)
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    digest = hashlib.file_digest(file, "sha256").hexdigest() if size == blob.size else ""
            except FileNotFoundError:
                raise self._missing(manifest, name) from None
            self._compare(manifest, name, size, digest)

    @contextlib.contextmanager
    def open(self, step: str, key: str) -> Iterator[StepWriter]:
        """Take the step's lease; it is given back on exit, however that comes. Errors: LeaseHeld."""
        if not STEP.fullmatch(step):
            raise ValueError(f"step name {step!r} must be lower-case words joined by dashes, for example stage-1")
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError(f"key {key!r} of step {step} must be 64 hex digits; make it with step_key")
        folder = self._folder(step, key)
        for name in ("leases", "blobs", "manifests"):
            make_folder(folder / name)
        lease = Lease.acquire(folder / "leases", self.lease_ttl_s, f"step {step} ({folder})")
        try:
            yield StepWriter(self, folder, step, key, lease)
        finally:
            lease.release()

    @property
    def _steps(self) -> Path:
        return self.root / "steps"

    def _folder(self, step: str, key: str) -> Path:
        return self._steps / f"{step}-{key[:16]}"

    def _seqs(self, folder: Path) -> list[int]:
        try:
            names = os.listdir(folder / "manifests")
        except FileNotFoundError:
            return []
        return sorted(int(match["seq"]) for name in names if (match := MANIFEST.fullmatch(name)))

    def _heads(self, step: str | None) -> list[Manifest]:
        heads = []
        for folder in self._steps.iterdir() if self._steps.is_dir() else ():
            match = FOLDER.fullmatch(folder.name)
            seqs = self._seqs(folder) if match and step in (None, match["step"]) else []
            heads += [_load(folder, seqs[-1])] if seqs else []
        return sorted(heads, key=lambda head: head.created_at)

    def _load(self, step: str, key: str, seq: int) -> Manifest:
        manifest = _load(self._folder(step, key), seq)
        if (manifest.step, manifest.key) != (step, key):
            came = f"step {manifest.step} with key {manifest.key}"
            raise ManifestError(f"{self._folder(step, key)} holds {came}, expected {step} with {key}; move it away")
        return manifest

    def _locate(self, manifest: Manifest, name: str) -> tuple[Path, Blob]:
        blob = manifest.blobs.get(name) or manifest.records.get(name)
        if blob is None:
            known = ", ".join([*manifest.blobs, *manifest.records]) or "nothing"
            raise KeyError(f"step {manifest.step} commit {manifest.seq} has no {name!r}; it has {known}")
        return self._folder(manifest.step, manifest.key) / "blobs" / blob.digest, blob

    def _compare(self, manifest: Manifest, name: str, size: int, digest: str) -> None:
        path, blob = self._locate(manifest, name)
        if size != blob.size:
            expected, came = f"{blob.size} bytes", f"{size} bytes"
        elif digest != blob.digest:
            expected, came = f"sha256 {blob.digest}", f"sha256 {digest}"
        else:
            return
        raise DigestMismatch(
            f"{name} of step {manifest.step} commit {manifest.seq} is damaged: {path}: expected {expected}, got {came}; "
            f"restore that file, or delete {path.parent.parent} to run the step again"
        )

    def _missing(self, manifest: Manifest, name: str) -> BlobMissing:
        path, _ = self._locate(manifest, name)
        where = f"{name} of step {manifest.step} commit {manifest.seq} is not there: {path}"
        head = self.head(manifest.step, manifest.key)
        if head is not None and head.seq > manifest.seq and name in manifest.blobs:
            return BlobMissing(f"{where}; only the newest commits keep their blobs (store.keep_checkpoints), use commit {head.seq}")
        return BlobMissing(f"{where}; restore that file, or delete {path.parent.parent} to run the step again")


class StepWriter:
    """The one live writer of a step; made by `RunStore.open`."""

    def __init__(self, store: RunStore, folder: Path, step: str, key: str, lease: Lease) -> None:
        self.step = step
        self.key = key
        self.epoch = lease.holder.epoch
        self._history = store.history(step, key)
        self._folder = folder
        self._lease = lease
        self._what = f"step {step} ({folder})"

    @property
    def head(self) -> Manifest | None:
        """The newest commit: what to continue from."""
        return self._history[-1] if self._history else None

    def commit(
        self,
        *,
        done: bool,
        state: dict[str, Any],
        parents: dict[str, str],
        config: dict[str, Any],
        blobs: Mapping[str, bytes | Blob],
        records: Mapping[str, bytes],
        results: dict[str, Any],
        timings: dict[str, float],
    ) -> Manifest:
        """Make everything durable, the manifest last: a kill before its last line leaves the previous head valid.

        A `Blob` in `blobs`, taken from the head, says "unchanged". Errors: Fenced, StoreFull, BlobMissing.
        """
        self._lease.check(self._what)  # before writing gigabytes for nothing
        seq = self.head.seq + 1 if self.head else 0
        manifest = Manifest(
            step=self.step,
            key=self.key,
            seq=seq,
            done=done,
            parents=parents,
            config=config,
            state=state,
            blobs={name: self._keep(name, value) if isinstance(value, Blob) else self._put(value) for name, value in blobs.items()},
            results=results,
            records={name: self._put(value) for name, value in records.items()},
            timings=timings,
            epoch=self.epoch,
            created_at=time.time(),
        )
        sync_folder(self._folder / "blobs")
        path = self._folder / "manifests" / f"{manifest.seq:06d}.json"
        temp = write_temp(path.parent, manifest.to_bytes())
        try:
            self._lease.check(self._what)
            if not create_exclusively(temp, path):
                raise Fenced(
                    f"{self._what}: commit {manifest.seq} was already made under epoch {_load(self._folder, manifest.seq).epoch}, not by "
                    f"this process ({self._lease.holder.pid}, epoch {self.epoch}); stop, and run the step again to continue from it"
                )
        finally:
            discard(temp)
        self._history.append(manifest)
        return manifest

    def prune(self, keep: int) -> int:
        """Remove blobs that only commits older than the newest `keep` name, and what killed writers left behind.

        Manifests and records stay. Result: number of files removed. Errors: Fenced.
        """
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1; the head's blobs are what a resumed run continues from")
        needed = {blob.digest for manifest in self._history for blob in manifest.records.values()}
        needed |= {blob.digest for manifest in self._history[-keep:] for blob in manifest.blobs.values()}
        garbage = [path for path in (self._folder / "blobs").iterdir() if path.name not in needed]
        garbage += [path for name in ("leases", "manifests") for path in (self._folder / name).glob(f"{TEMP_PREFIX}*")]
        for path in garbage:
            self._lease.check(self._what)  # a newer holder may be about to name these
            discard(path)
        return len(garbage)

    def _put(self, data: bytes) -> Blob:
        """Store content under its digest. What lies there already counts only if it is whole."""
        blob = Blob.of(data)
        path = self._folder / "blobs" / blob.digest
        if not _holds(path, blob):
            temp = write_temp(path.parent, data)
            try:
                temp.rename(path)
            except FileNotFoundError:  # a newer holder cleaned up
                self._lease.check(self._what)
                raise
        return blob

    def _keep(self, name: str, blob: Blob) -> Blob:
        path = self._folder / "blobs" / blob.digest
        if not path.is_file() or path.stat().st_size != blob.size:
            raise BlobMissing(f"{self._what}: {name} was given as unchanged, but {path} is not {blob.size} bytes; pass the bytes")
        return blob


def _load(folder: Path, seq: int) -> Manifest:
    path = folder / "manifests" / f"{seq:06d}.json"
    return Manifest.from_bytes(path.read_bytes(), where=str(path))


def _holds(path: Path, blob: Blob) -> bool:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == blob.size and hashlib.file_digest(file, "sha256").hexdigest() == blob.digest
    except FileNotFoundError:
        return False
