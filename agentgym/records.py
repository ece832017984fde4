"""File format of episodes: gzipped JSON lines, one trajectory each.

Each line has the number of its schema. Schema 2 has an id, and for each turn the text beyond the
action, the environment's info and the times. Schema 1 lacks these and can be read, too.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, BinaryIO

import pydantic_core

from agentgym.types import Item, Learned, Status, Trajectory, Turn, Usage, flat

TRAJECTORIES = "trajectories.jsonl.gz"  # a record of a commit
ATTEMPTS = "attempts.jsonl.gz"  # the same, for failed attempts at an evaluation's episodes
DEMOS = "demos.jsonl.gz"  # a blob of the step that plays demonstrations
SCHEMA = 2
_COMPRESSION = 3  # level of gzip; higher ones cost more time than the space is worth
# limit of a file's unpacked size: MAX_UNFOLDED bytes plus MAX_RATIO times its packed size. Episodes
# with tokens have a ratio of four to ten; gzip allows a thousand.
MAX_UNFOLDED, MAX_RATIO = 64 * 2**20, 32
_PIECE = 2**20  # bytes of a line that are unpacked at a time
# exceptions from damaged or forged content
DAMAGE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RecursionError)


class RecordError(ValueError):
    """Content that is not a record of this project, or one of a later version."""


def encode_trajectories(trajectories: Iterable[Trajectory]) -> bytes:
    """Return a file of episodes as bytes; equal trajectories with equal times give equal bytes."""
    return joined(map(encode_line, trajectories))


def encode_line(trajectory: Trajectory) -> bytes:
    """Return one trajectory as a line of JSON that ends with a newline, for `joined`."""
    row = to_json(trajectory)
    try:
        line = pydantic_core.to_json(row, inf_nan_mode="constants")  # json takes five times as long
    except pydantic_core.PydanticSerializationError:  # half a surrogate pair, as models may write
        line = json.dumps(row, separators=(",", ":")).encode()
    return line + b"\n"


def joined(lines: Iterable[bytes]) -> bytes:
    """Return a file of episodes: lines of `encode_line`, gzipped. Equal lines give equal bytes."""
    return gzip.compress(b"".join(lines), compresslevel=_COMPRESSION, mtime=0)


def decode_trajectories(data: bytes) -> list[Trajectory]:
    """Return the trajectories of a file's content. Errors: RecordError if one cannot be read."""
    return list(read_trajectories(io.BytesIO(data)))


def read_trajectories(file: BinaryIO) -> Iterator[Trajectory]:
    """Yield the trajectories of a gzipped file one by one, to save memory.
    Errors: RecordError for damaged content (names the line), an unknown schema, or a file that
    unpacks to too much.
    """
    number = 1
    try:
        for line in lines_of(file):
            yield from_json(json.loads(line))
            number += 1
    except RecordError:
        raise
    except DAMAGE as error:
        raise RecordError(
            f"line {number} of the episodes is no trajectory: {type(error).__name__} {error}"
        ) from error


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield a gzip file's lines, with their newlines; the last one may have none.
    Errors: RecordError if it unpacks to more than MAX_UNFOLDED and MAX_RATIO allow; an exception in
    `DAMAGE` if it is damaged.
    """
    packed, size = _Counted(file), 0
    line: list[bytes] = []
    with gzip.GzipFile(fileobj=packed) as lines:
        while piece := lines.readline(_PIECE):
            size += len(piece)
            line.append(piece)
            if size > MAX_UNFOLDED + MAX_RATIO * packed.num_bytes:
                raise RecordError(
                    f"a file of episodes unfolds to more than {MAX_UNFOLDED} bytes and"
                    f" {MAX_RATIO} times its own; it was made to fill memory, restore it from a"
                    " copy"
                )
            if piece.endswith(b"\n"):
                yield b"".join(line)
                line = []
        if line:
            yield b"".join(line)


class _Counted(io.RawIOBase):
    """A file that counts the bytes read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a dict that JSON can encode. Values that equal their field's default
    are left out, but item and usage are complete.
    `from_json` inverts it. (`asdict` takes 20 times as long.)
    """
    row: dict[str, Any] = {"schema": SCHEMA} | _told(trajectory, _TRAJECTORY)
    row["item"] = flat(trajectory.item)
    row["turns"] = [_told(turn, _TURN) for turn in trajectory.turns]
    if trajectory.learned is not None:
        row["learned"] = _told(trajectory.learned, _LEARNED)
    if trajectory.usage is not None:
        row["usage"] = flat(trajectory.usage)
    return row


def from_json(row: dict[str, Any]) -> Trajectory:
    """Return the trajectory of a row from `to_json`.

    Errors: KeyError, TypeError or ValueError if the row is no trajectory, RecordError if its schema
    is unknown.
    """
    row = dict(checked_row(row))
    row.pop("schema", None)
    for name in ("input_ids", "action_mask", "logprobs"):
        row[name] = tuple(row[name])
    row["item"], row["status"] = Item(**row["item"]), Status(row["status"])
    row["turns"] = tuple(Turn(**turn) for turn in row["turns"])
    if "learned" in row:
        learned = dict(row["learned"])
        excluded = learned.pop("excluded", "")
        row["learned"] = Learned(
            **{name: tuple(v) for name, v in learned.items()}, excluded=excluded
        )
    if row.get("usage") is not None:
        row["usage"] = Usage(**row["usage"])
    return Trajectory(**row)


def checked_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row itself. Errors: TypeError if it is no dict; RecordError for another schema."""
    if not isinstance(row, dict):
        raise TypeError(f"an object was expected, not {row!r:.40}")
    schema = row.get("schema", 1)
    if schema not in (1, SCHEMA):
        raise RecordError(
            f"an episode of record schema {schema!r}; this version reads up to {SCHEMA}: update it"
        )
    return row


class _Fields:
    """Names of a dataclass's fields, their defaults (MISSING if a field has none), and a function
    that reads all values from an instance.
    """

    def __init__(self, kind: type[Trajectory | Turn | Learned]) -> None:
        self.names = tuple(field.name for field in fields(kind))
        self.defaults = tuple(
            field.default if field.default_factory is MISSING else field.default_factory()
            for field in fields(kind)
        )
        self.values = attrgetter(*self.names)


_TRAJECTORY, _TURN, _LEARNED = map(_Fields, (Trajectory, Turn, Learned))


def _told(record: Trajectory | Turn | Learned, known: _Fields) -> dict[str, Any]:
    return {
        name: value
        for name, value, default in zip(
            known.names, known.values(record), known.defaults, strict=True
        )
        if value is not default and value != default
    }
