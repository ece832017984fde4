"""What one commit is: the record that owns a step's progress, and the digest that says two of
them are equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SCHEMA_VERSION = 1
MAX_DEPTH = 100  # levels of a commit's file
SEVERAL = 2  # schema version of a file that holds the manifests of several optimizer steps
# They hold clock times, or say who wrote and in how many commits.
NOT_IDENTITY = frozenset({"records", "timings", "epoch", "created_at", "seq", "follows"})
# They become parts of paths, on disk and on S3, and a store may come from somebody else.
STEP = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # sha256


class ManifestError(ValueError):
    """A manifest that cannot be used as it is: unreadable, changed by hand, or of a newer
    schema.
    """


class ManifestDamaged(ManifestError):
    """Not what was written."""


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII.

    Errors: ValueError for NaN and infinities, TypeError for what JSON cannot hold; both name the
    place.
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
    """Names content; where it lies is the store's business."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: Digest
    size: int = Field(ge=0)  # bytes

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(digest=sha256(data), size=len(data))


class Manifest(BaseModel):
    """One commit of one step.
    Values are kept as JSON would give them back, so a digest survives the disk.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    step: str  # "stage-1"
    key: Digest
    seq: int = Field(ge=0)  # commits inside the step: 0, 1, 2, ...
    done: bool
    parents: dict[str, Digest]  # parent step -> digest of its final manifest
    config: dict[str, Any]  # semantic config of this step
    state: dict[str, Any]  # what a resumed run continues from
    blobs: dict[str, Blob]  # reproducible content
    results: dict[str, Any]  # reported numbers

    # logs of this commit alone; the whole log is their sum over seq
    records: dict[str, Blob] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)  # seconds
    epoch: int = 0  # of the lease it was written under
    created_at: float = 0.0  # seconds since 1970
    # records digest of the commit before, "" for the first; None: written before there was one
    follows: str | None = Field(default=None, pattern=r"^([0-9a-f]{64})?$")

    @field_validator("config", "state", "results", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return json.loads(canonical_json(value))

    @model_validator(mode="after")
    def _names_are_no_paths(self) -> Self:
        """Whoever reads a manifest may write a file under any name in it."""
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
        """sha256 over the identity: equal for two runs that reached equal results, whoever ran
        them and when.
        """
        return sha256(canonical_json(self.model_dump(exclude=set(NOT_IDENTITY))))

    @property
    def records_digest(self) -> str:
        """sha256 over everything here, records and times too, and by `follows` over all commits
        before.

        No two runs have an equal one: it says that nobody changed this one's logs since.
        """
        return sha256(canonical_json(self.model_dump()))

    def to_tree(self) -> dict[str, Any]:
        """As JSON for the disk, with the digests beside the fields."""
        tree, second = self.model_dump(), {"records_digest": self.records_digest}
        if self.follows is None:  # as it was written
            del tree["follows"]
            second = {}
        return {"digest": self.digest, **second, **tree}

    @classmethod
    def from_tree(cls, tree: Any, *, where: str) -> Self:
        """The inverse of `to_tree`. `where` names the source in errors. Errors: ManifestError."""
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
        written, second = tree.pop("digest", None), tree.pop("records_digest", None)
        try:
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = (
                "".join(f"{part}: " for part in problem["loc"]).encode("unicode_escape").decode()
            )
            reason = problem["msg"].removeprefix("Value error, ")
            raise ManifestDamaged(f"{where}: {place}{reason}; restore it from a copy") from None
        if manifest.digest != written:
            raise ManifestDamaged(
                f"{where} says digest {written}, its content has {manifest.digest}: it was changed;"
                " restore it from a copy"
            )
        if (
            manifest.follows is not None or second is not None
        ) and manifest.records_digest != second:
            raise ManifestDamaged(
                f"{where} says records digest {second}, its content has {manifest.records_digest}:"
                " its records or times were changed; restore it from a copy"
            )
        return manifest


def encode_commit(manifests: Sequence[Manifest]) -> bytes:
    """The file of one commit: the manifests of all optimizer steps it made durable, in order."""
    trees = [manifest.to_tree() for manifest in manifests]
    tree = trees[0] if len(trees) == 1 else {"schema_version": SEVERAL, "commits": trees}
    return json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n"


def decode_commit(data: bytes, *, where: str = "manifest") -> list[Manifest]:
    """The inverse of `encode_commit`. `where` names the source in errors. Errors: ManifestError."""
    try:
        tree = json.loads(data)
        _check_depth(tree)
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
    return [Manifest.from_tree(each, where=where) for each in trees]


def _check_depth(tree: Any) -> None:
    """Raise ValueError for a tree that is nested too deep to be compared or written again."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _culprit(value: Any, place: str = "value") -> str:
    """Where inside `value` the first thing lies that JSON refuses."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"{place}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(f"{place}[{index}]", child) for index, child in enumerate(value)]
    for name, child in children:
        try:
            json.dumps(child, allow_nan=False)
        except (TypeError, ValueError):
            return _culprit(child, name)
    return f"{place} of type {type(value).__name__}"
