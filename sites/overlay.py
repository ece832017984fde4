"""Copy-on-write records: sessions share the generated records, and each stores only its changes.

Records are frozen, so no session can alter another's.
The dict of a table's changes is never changed in place: each write replaces it with a new dict.
Only one thread writes (the server's loop), so readers in other threads need no lock: they see a
table before or after a write.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar


class Record(Protocol):
    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=Record)
S = TypeVar("S")


class Seed(Generic[R]):
    """The generated records of one kind, in order of ids; all tables made from it share them."""

    def __init__(self, rows: Iterable[R]) -> None:
        self.rows = {row.id: row for row in rows}
        self.last_id = max(self.rows, default=0)
        self._indexes: dict[str, dict[Any, list[int]]] = {}

    def ids(self, field: str, value: Any) -> list[int]:
        """Return ids of records whose `field` is `value`, in the seed's order, as a shared list."""
        index = self._indexes.get(field)
        if index is None:
            index = {}
            for row in self.rows.values():
                index.setdefault(getattr(row, field), []).append(row.id)
            self._indexes[field] = index
        return index.get(value, [])


class Table(Generic[R]):
    """One session's records: those of a seed, overlaid by the session's changes. In `_own`, None
    marks a removed record.
    """

    __slots__ = ("_own", "seed")

    def __init__(self, seed: Seed[R]) -> None:
        self.seed = seed
        self._own: dict[int, R | None] = {}

    def get(self, id: int, **fields: Any) -> R | None:
        """Return the record of an id; None if there is none or its `fields` have other values."""
        changes = self._own
        record = changes[id] if id in changes else self.seed.rows.get(id)
        return record if record is not None and _has(record, fields) else None

    def __getitem__(self, id: int) -> R:
        """Return the record of an id. Errors: KeyError if there is no such record."""
        record = self.get(id)
        if record is None:
            raise KeyError(id)
        return record

    def __iter__(self) -> Iterator[R]:
        """Iterate over the seed's records by id, then the session's new ones as they were added."""
        rows = {**self.seed.rows, **self._own}.values()
        return (record for record in rows if record is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def where(self, field: str, value: Any) -> list[R]:
        """Return the records whose `field` is `value`, sorted by id."""
        changes = self._own
        unchanged = [self.seed.rows[id] for id in self.seed.ids(field, value) if id not in changes]
        changed = [row for row in changes.values() if row and getattr(row, field) == value]
        return sorted(unchanged + changed, key=lambda record: record.id) if changed else unchanged

    def first(self, field: str, value: Any, **others: Any) -> R | None:
        return next((row for row in self.where(field, value) if _has(row, others)), None)

    def next_id(self) -> int:
        """Return an id that no record has had before, removed ones included."""
        return max(self.seed.last_id, max(self._own, default=0)) + 1

    def put(self, record: R) -> R:
        """Add the record, or replace the one with the same id. Return the record."""
        self._own = {**self._own, record.id: record}
        return record

    def remove(self, id: int) -> None:
        self._own = {**self._own, id: None}


def _has(record: Record, fields: Mapping[str, Any]) -> bool:
    return all(getattr(record, name) == value for name, value in fields.items())


def fresh(state: S) -> S:
    """Return a copy of a session's state without the session's changes; the copy shares the
    generated records.
    """
    copied = copy.copy(state)
    for name, table in vars(state).items():
        if isinstance(table, Table):
            setattr(copied, name, Table(table.seed))
    return copied
