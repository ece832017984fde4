"""The one live writer of a step: commits, and what they keep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.store.lease import Folder, Lease
from agentgym.store.manifest import Blob, BlobMissing, Manifest, encode_commit


@dataclass(frozen=True, slots=True)
class PassedStep:
    """An optimizer step that becomes durable with a later one.
    It has no blobs, because a resumed run needs those of the last step alone.
    """

    state: dict[str, Any]
    records: Mapping[str, bytes]
    results: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # seconds
    at: float = field(default_factory=time.time)  # seconds since 1970


class StepWriter:
    """The one live writer of a step; made by `RunStore.open`."""

    def __init__(
        self,
        folder: Folder,
        lease: Lease,
        step: str,
        key: str,
        commits: list[list[Manifest]],
    ) -> None:
        """Begin with the step's commits, each a list of the manifests of its optimizer steps."""
        self.step = step
        self.key = key
        self.epoch = lease.holder.epoch
        self._commits = commits
        self._folder = folder
        self._lease = lease
        self._pinned = {
            blob.digest
            for commit in commits
            for manifest in commit
            for blob in manifest.records.values()
        }
        # stored blobs that pruning may remove; None until the first pruning lists them
        self._loose: set[str] | None = None

    @property
    def head(self) -> Manifest | None:
        """The newest commit, to continue from."""
        return self._commits[-1][-1] if self._commits else None

    @property
    def has_earlier(self) -> bool:
        """True if there is a commit before the newest one."""
        return len(self._commits) > 1

    def commit(
        self,
        *,
        done: bool,
        config: dict[str, Any],
        state: dict[str, Any] | None = None,
        parents: dict[str, str] | None = None,
        blobs: Mapping[str, bytes | Blob] | None = None,
        records: Mapping[str, bytes] | None = None,
        results: dict[str, Any] | None = None,
        timings: dict[str, float] | None = None,
        earlier: Sequence[PassedStep] = (),
    ) -> Manifest:
        """Make everything durable, the manifest last: a kill before the end leaves the previous
        head valid.

        blobs: a `Blob` is stored already, by `RunStore.add` or because it is unchanged.
        earlier: steps since the last commit; each has a manifest of its own in the same file.
        Errors: Fenced, StoreFull, BlobMissing.
        """
        self._lease.check()  # before writing gigabytes for nothing
        last_blobs = {
            name: self._keep(name, value) if isinstance(value, Blob) else self._put(value)
            for name, value in (blobs or {}).items()
        }
        last = PassedStep(state or {}, records or {}, results or {}, timings or {})
        manifests: list[Manifest] = []
        previous = self.head
        for passed in (*earlier, last):
            previous = Manifest(
                step=self.step,
                key=self.key,
                seq=previous.seq + 1 if previous else 0,
                done=done and passed is last,
                parents=parents or {},
                config=config,
                state=passed.state,
                blobs=last_blobs if passed is last else {},
                results=passed.results,
                records={name: self._put(value) for name, value in passed.records.items()},
                timings=passed.timings,
                epoch=self.epoch,
                created_at=passed.at,
                follows=previous.records_digest if previous else "",
            )
            manifests.append(previous)
        manifest = manifests[-1]
        self._lease.commit(manifests[0].seq, manifest.seq, encode_commit(manifests))
        self._commits.append(manifests)
        recorded = {blob.digest for step in manifests for blob in step.records.values()}
        self._pinned |= recorded
        if self._loose is not None:
            self._loose -= recorded
        return manifest

    def check(self) -> None:
        """Raise Fenced if another process took the step over."""
        self._lease.check()

    def fall_back(self) -> Manifest | None:
        """Drop the newest commit, whose content is damaged. Return the one before, if any.
        Errors: Fenced.
        """
        self._lease.drop(self._commits[-1][0].seq)
        self._commits.pop()
        self._loose = None
        return self.head

    def prune(self, keep: int, *, also: int | None = None) -> int:
        """Remove blobs that none of the newest `keep` commits uses, and killed writers' leftovers.
        also: seq of one more commit that keeps its blobs.

        Manifests and records stay.
        The first call lists the folder; later calls cost only what changed.
        Result: number of files removed. Errors: Fenced.
        """
        if keep < 1:
            raise ValueError(
                f"keep {keep} must be at least 1; the head's blobs are what a resumed run continues"
                " from"
            )
        num_swept = 0
        if self._loose is None:
            num_swept = self._lease.sweep()
            self._loose = self._folder.blobs() - self._pinned
        garbage = self._loose - {
            blob.digest
            for index, commit in enumerate(self._commits, keep - len(self._commits))
            if index >= 0 or commit[-1].seq == also
            for blob in commit[-1].blobs.values()
        }
        for digest in sorted(garbage):
            self._lease.check()  # a newer holder may be about to commit this blob
            self._folder.remove(digest)
            self._loose.discard(digest)
        return num_swept + len(garbage)

    def _put(self, data: bytes) -> Blob:
        blob = Blob.of(data)
        try:
            self._folder.put(blob, data)
        except FileNotFoundError:  # a newer holder cleaned up
            self._lease.check()
            raise
        self._note(blob)
        return blob

    def _note(self, blob: Blob) -> None:
        if self._loose is not None and blob.digest not in self._pinned:
            self._loose.add(blob.digest)

    def _keep(self, name: str, blob: Blob) -> Blob:
        try:
            size = self._folder.size(blob.path)
        except FileNotFoundError:
            size = -1
        if size != blob.size:
            path = f"{self._folder.place}/{blob.path}"
            raise BlobMissing(
                f"step {self.step}: {name} was given as stored, but {path} is not {blob.size}"
                " bytes; pass the bytes"
            )
        self._note(blob)
        return blob
