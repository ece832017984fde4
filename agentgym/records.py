"""Episodes as they are kept: gzipped JSON lines, one trajectory each.

A line says which schema it has: 2 has an id, and of each turn what was said beyond the action, the
environment's info and the times. Lines of schema 1, which has none of these, are read as well.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, BinaryIO

import pydantic_core

from agentgym.types import Item, Learned, Status, Trajectory, Turn, Usage, flat

TRAJECTORIES = "trajectories.jsonl.gz"  # a record of a commit
DEMOS = "demos.jsonl.gz"  # a blob of the step that plays demonstrations
SCHEMA = 2
_COMPRESSION = 3  # gzip's; more costs more time than it saves room


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
        with gzip.open(file, "rb") as lines:
            for line in lines:
                yield from_json(json.loads(line))
                number += 1
    except (OSError, EOFError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise RecordError(
            f"line {number} of the episodes is no trajectory: {type(error).__name__} {error}"
        ) from error


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
