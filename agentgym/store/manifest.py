"""What one commit is: the record that owns a step's progress, and the digest that says two of them are equal."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

SCHEMA_VERSION = 1
# They hold clock times, or say who wrote and in how many commits.
NOT_IDENTITY = frozenset({"records", "timings", "epoch", "created_at", "seq"})


class ManifestError(ValueError):
    """A manifest that cannot be used as it is: unreadable, changed by hand, or of a newer schema."""


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII.

    Errors: ValueError for NaN and infinities, TypeError for what JSON cannot hold; both name the place.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_culprit(value)} is not plain JSON ({error}); use finite numbers, strings, lists and mappings") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Blob(BaseModel):
    """Names content; where it lies is the store's business."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")  # sha256
    size: int = Field(ge=0)  # bytes

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(digest=sha256(data), size=len(data))


class Manifest(BaseModel):
    """One commit of one step. Values are kept as JSON would give them back, so a digest survives the disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    step: str  # "stage-1"
    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    seq: int = Field(ge=0)  # commits inside the step: 0, 1, 2, ...
    done: bool
    parents: dict[str, str]  # parent step -> digest of its final manifest
    config: dict[str, Any]  # semantic config of this step
    state: dict[str, Any]  # what a resumed run continues from
    blobs: dict[str, Blob]  # reproducible content
    results: dict[str, Any]  # reported numbers

    records: dict[str, Blob] = Field(default_factory=dict)  # logs of this commit alone; the whole log is their sum over seq
    timings: dict[str, float] = Field(default_factory=dict)  # seconds
    epoch: int = 0  # of the lease it was written under
    created_at: float = 0.0  # seconds since 1970

    @field_validator("config", "state", "results", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return json.loads(canonical_json(value))

    @property
    def digest(self) -> str:
        """sha256 over the identity: equal for two runs that reached equal results, whoever ran them and when."""
        return sha256(canonical_json(self.model_dump(exclude=set(NOT_IDENTITY))))

    def to_bytes(self) -> bytes:
        """JSON for the disk, with the digest beside the fields."""
        return json.dumps({"digest": self.digest, **self.model_dump()}, indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "manifest") -> Self:
        """`where` names the source in errors. Errors: ManifestError."""
        try:
            tree = json.loads(data)
        except ValueError as error:
            raise ManifestError(f"{where} is not JSON ({error}); a commit is never half written, so restore it from a copy") from None
        version = tree.get("schema_version") if isinstance(tree, dict) else None
        if not isinstance(version, int):
            raise ManifestError(f"{where} has no schema_version; it is no manifest of this project, move it away")
        if version > SCHEMA_VERSION:
            raise ManifestError(
                f"{where} has schema_version {version}, this agentgym reads up to {SCHEMA_VERSION}; upgrade it or use another store"
            )
        written = tree.pop("digest", None)
        try:
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise ManifestError(f"{where}: {place}: {problem['msg']}; restore it from a copy") from None
        if manifest.digest != written:
            raise ManifestError(f"{where} says digest {written}, its content has {manifest.digest}: it was changed; restore it from a copy")
        return manifest


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
