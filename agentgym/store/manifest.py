"""Commits: manifests, the digest by which two are equal, and the one live writer of a step."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

if TYPE_CHECKING:
    from agentgym.store.lease import Folder, Lease

SCHEMA_VERSION = 1
MAX_DEPTH = 100  # levels of a commit's file
SEVERAL = 2  # schema version of a file that holds the manifests of several optimizer steps
# These fields hold clock times, the writer's identity or the number of commits.
NOT_IDENTITY = frozenset({"records", "timings", "epoch", "created_at", "seq", "follows"})
# Names become parts of paths, on disk and on S3, and a store may come from someone you do not
# trust.
STEP = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # sha256


class ManifestError(ValueError):
    """A manifest that cannot be used: unreadable, changed by hand, or of a newer schema."""


class BlobMissing(LookupError):
    """Content that a manifest names is absent: pruned, or lost."""


class DigestMismatch(ValueError):
    """Stored content differs from what was committed."""


class ManifestDamaged(ManifestError):
    """A manifest whose content differs from what was written."""


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, ASCII.

    Errors: ValueError for NaN and infinities, TypeError for values that JSON cannot hold; both name
    the path to the value.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{_culprit(value)} is not plain JSON ({error}); use finite numbers, strings, lists and"
            " mappings"
        ) from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Blob(BaseModel):
    """The name of stored content: digest and size, without a location."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: Digest
    size: int = Field(ge=0)  # bytes

    @property
    def path(self) -> str:
        """Path below the step's folder."""
        return f"blobs/{self.digest}"

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(digest=sha256(data), size=len(data))


class Manifest(BaseModel):
    """One commit of one step.
    Values are stored as JSON returns them, so that a digest is the same after a round trip.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    step: str  # "stage-1"
    key: Digest
    seq: int = Field(ge=0)  # commits inside the step: 0, 1, 2, ...
    done: bool
    parents: dict[str, Digest]  # parent step -> digest of its final manifest
    config: dict[str, Any]  # semantic config of this step
    state: dict[str, Any]  # a resumed run continues from it
    blobs: dict[str, Blob]  # reproducible content
    results: dict[str, Any]  # reported numbers

    # logs of this commit alone; the whole log is their concatenation over seq
    records: dict[str, Blob] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)  # seconds
    epoch: int = 0  # of the lease it was written under
    created_at: float = 0.0  # seconds since 1970
    # records digest of the commit before, "" for the first; None: older than this field
    follows: str | None = Field(default=None, pattern=r"^([0-9a-f]{64})?$")

    @field_validator("config", "state", "results", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return json.loads(canonical_json(value))

    @model_validator(mode="after")
    def _names_are_no_paths(self) -> Self:
        """Raise ValueError for a step, blob or record name that is unsafe as part of a path, and
        for a name of both a blob and a record.
        """
        for step in (self.step, *self.parents):
            if len(step) > 100 or not STEP.fullmatch(step):
                raise ValueError(f"step name {step!r} is not lower-case words joined by dashes")
        for name in (*self.blobs, *self.records):
            if not FILE_NAME.fullmatch(name):
                raise ValueError(
                    f"name {name!r} is no plain file name: a letter or digit, then letters, "
                    "digits, dots, dashes and underscores, 100 at most"
                )
        if twice := self.blobs.keys() & self.records.keys():
            raise ValueError(f"{min(twice)!r} is named as a blob and as a record")
        return self

    @property
    def digest(self) -> str:
        """sha256 of all fields except NOT_IDENTITY: equal for equal results, at any time."""
        return sha256(canonical_json(self.model_dump(exclude=set(NOT_IDENTITY))))

    @property
    def records_digest(self) -> str:
        """sha256 of all fields, also records and times, and by `follows` of all commits before.

        No two runs have an equal one: it proves that this run's logs are unchanged.
        """
        return sha256(canonical_json(self.model_dump()))

    def to_tree(self) -> dict[str, Any]:
        """Return the digests and fields as plain JSON types, for the file of the commit.
        An old manifest, without `follows`, gets neither `follows` nor `records_digest`.
        """
        tree, records_digest = self.model_dump(), {"records_digest": self.records_digest}
        if self.follows is None:  # keep an old manifest byte for byte
            del tree["follows"]
            records_digest = {}
        return {"digest": self.digest, **records_digest, **tree}

    @classmethod
    def from_tree(cls, tree: Any, *, where: str) -> Self:
        """Invert `to_tree` and verify the digests, which are removed from `tree`.
        `where` names the source in errors. Errors: ManifestError.
        """
        version = tree.get("schema_version") if isinstance(tree, dict) else None
        if not isinstance(version, int):
            raise ManifestError(
                f"{where} has no schema_version; it is no manifest of this project, move it away"
            )
        if version > SCHEMA_VERSION:
            raise ManifestError(
                f"{where} has schema_version {version}, this agentgym reads up to {SEVERAL};"
                " upgrade it or use another store"
            )
        digest, records_digest = tree.pop("digest", None), tree.pop("records_digest", None)
        try:
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            path = "".join(f"{part}: " for part in problem["loc"]).encode("unicode_escape").decode()
            reason = problem["msg"].removeprefix("Value error, ")
            raise ManifestDamaged(f"{where}: {path}{reason}; restore it from a copy") from None
        if manifest.digest != digest:
            raise ManifestDamaged(
                f"{where} states digest {digest}, its content has {manifest.digest}: it was"
                " changed; restore it from a copy"
            )
        if (
            manifest.follows is not None or records_digest is not None
        ) and manifest.records_digest != records_digest:
            raise ManifestDamaged(
                f"{where} states records digest {records_digest}, its content has"
                f" {manifest.records_digest}: its records or times were changed; restore it from a"
                " copy"
            )
        return manifest


def encode_commit(manifests: Sequence[Manifest]) -> bytes:
    """Return the content of a commit's file: the manifests of its optimizer steps, in order."""
    trees = [manifest.to_tree() for manifest in manifests]
    tree = trees[0] if len(trees) == 1 else {"schema_version": SEVERAL, "commits": trees}
    return json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n"


def decode_commit(data: bytes, *, where: str = "manifest") -> list[Manifest]:
    """Return the verified manifests of a commit's file. where: its name in errors.
    Errors: ManifestError.
    """
    try:
        tree = json.loads(data)
        if not _is_flat(tree, MAX_DEPTH):  # it could not be compared or written again
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    except (ValueError, RecursionError) as error:
        raise ManifestDamaged(
            f"{where} is not JSON ({error}); a commit is never half written, so restore it from a"
            " copy"
        ) from None
    if not (isinstance(tree, dict) and tree.get("schema_version") == SEVERAL):
        return [Manifest.from_tree(tree, where=where)]
    trees = tree.get("commits")
    if not (isinstance(trees, list) and trees):
        raise ManifestDamaged(f"{where} holds no commit; restore it from a copy")
    return [Manifest.from_tree(child, where=where) for child in trees]


def _is_flat(tree: Any, levels: int) -> bool:
    """Return True if lists and mappings are nested in at most so many levels."""
    if not isinstance(tree, dict | list):
        return True
    children = tree.values() if isinstance(tree, dict) else tree
    return levels > 0 and all(_is_flat(child, levels - 1) for child in children)


def _culprit(value: Any, path: str = "value") -> str:
    """Return the path and type of the first value in `value` that JSON refuses."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"{path}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    for name, child in children:
        try:
            json.dumps(child, allow_nan=False)
        except (TypeError, ValueError):
            return _culprit(child, name)
    return f"{path} of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class PassedStep:
    """An optimizer step that is committed together with a later one.
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
        self, folder: Folder, lease: Lease, step: str, key: str, commits: list[list[Manifest]]
    ) -> None:
        """Begin with the step's commits, each a list of the manifests of its optimizer steps.
        The writer appends to the list `commits`. The caller releases `lease`.
        """
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
        """The newest manifest, to continue from; None before the first commit."""
        return self._commits[-1][-1] if self._commits else None

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
        """Make everything durable, the manifest last, and return it. A kill before the end leaves
        the previous head valid.

        Parameters are fields of `Manifest`, except `earlier`: optimizer steps since the last
        commit, each of which gets a manifest in the same file.
        blobs: a `Blob` is stored already, by `RunStore.add` or because it is unchanged.
        Errors: Fenced, StoreFull, BlobMissing; ValueError or TypeError for an invalid field.
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
        """Drop the newest commit, whose content is damaged, and return the one before. If there is
        none before, change nothing and return None. Errors: Fenced.
        """
        if len(self._commits) < 2:
            return None
        self._lease.drop(self._commits[-1][0].seq)
        self._commits.pop()
        self._loose = None
        return self.head

    def prune(self, keep: int, *, also: int | None = None) -> int:
        """Remove blobs that none of the newest `keep` commits uses, and killed writers' leftovers.
        also: seq of one more commit that keeps its blobs.

        Manifests and records stay.
        The first call lists the folder; later calls cost only what changed.
        Result: number of files removed. Errors: Fenced; ValueError if keep < 1.
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
