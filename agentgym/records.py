"""Episodes as they are kept: gzipped JSON lines, one trajectory each.

A line says which schema it has: 2 has an id, and of each turn what was said beyond the action, the
environment's info and the times. Lines of schema 1, which has none of these, are read as well.
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
ATTEMPTS = "attempts.jsonl.gz"  # the same, of attempts at an evaluation's episode that failed
DEMOS = "demos.jsonl.gz"  # a blob of the step that plays demonstrations
SCHEMA = 2
_COMPRESSION = 3  # gzip's; more costs more time than it saves room
# bytes that a file of episodes may unfold to, and as many more for each of its own; gzip would
# take a thousand, and episodes with tokens have four to ten
MAX_UNFOLDED, MAX_RATIO = 64 * 2**20, 32
_PIECE = 2**20  # bytes of a line that are unfolded at a time
# what content raises that is damaged, or was made to look so
DAMAGE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RecursionError)


class RecordError(ValueError):
    """What was read is no record of ours, or one of a later version."""


def encode_trajectories(trajectories: Iterable[Trajectory]) -> bytes:
    """Equal trajectories give equal bytes, but for their times."""
    return joined(map(encode_line, trajectories))


def encode_line(trajectory: Trajectory) -> bytes:
    """For `joined`."""
    row = to_json(trajectory)
    try:
        line = pydantic_core.to_json(row, inf_nan_mode="constants")  # json takes five times as long
    except pydantic_core.PydanticSerializationError:  # half a surrogate pair, as models may write
        line = json.dumps(row, separators=(",", ":")).encode()
    return line + b"\n"


def joined(lines: Iterable[bytes]) -> bytes:
    """What `encode_trajectories` makes of the trajectories of these lines."""
    return gzip.compress(b"".join(lines), compresslevel=_COMPRESSION, mtime=0)


def decode_trajectories(data: bytes) -> list[Trajectory]:
    """The inverse of `encode_trajectories`. Errors: RecordError."""
    return list(read_trajectories(io.BytesIO(data)))


def read_trajectories(file: BinaryIO) -> Iterator[Trajectory]:
    """One after the other, so that a reader holds no more than it wants.
    Errors: RecordError naming the line.
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
    """The lines of a gzip file. Errors: RecordError where it unfolds to more than episodes do;
    those of `DAMAGE`.
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
    """A file to read, and how much of it was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Plain JSON types; `from_json` gives an equal object back.
    By hand: `asdict` copies token by token, 20 times slower. What has its default is left out.
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
    """Errors: KeyError or TypeError where the row is not one of ours, RecordError where it is of
    a later version.
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
    """The row, which this version can read. Errors: RecordError; TypeError where it is no row."""
    if not isinstance(row, dict):
        raise TypeError(f"an object was expected, not {row!r:.40}")
    schema = row.get("schema", 1)
    if schema not in (1, SCHEMA):
        raise RecordError(
            f"an episode of record schema {schema!r}; this version reads up to {SCHEMA}: update it"
        )
    return row


class _Fields:
    """Names and defaults of a record's fields; MISSING, which equals nothing, where there is no
    default.
    """

    def __init__(self, kind: type[Trajectory | Turn | Learned]) -> None:
        self.names = tuple(each.name for each in fields(kind))
        self.defaults = tuple(
            each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(kind)
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
