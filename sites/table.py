"""Records that every session shares until it changes them: what a session's sites know, at the
price of its changes alone.

Records are frozen, so no session can alter another's.
A table's own records are never changed in place either: each write puts a new dict in the place of
the old one.
With one writing thread (the server's loop) readers in other threads therefore need no lock: they
see a table before or after a write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class Record(Protocol):
    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=Record)


class Seed(Generic[R]):
    """The generated records of one kind, in order of their ids; shared by all tables made of it."""

    def __init__(self, rows: Iterable[R]) -> None:
        self.rows = {row.id: row for row in rows}
        self.last_id = max(self.rows, default=0)
        self._indexes: dict[str, dict[Any, list[int]]] = {}

    def ids(self, field: str, value: Any) -> list[int]:
        """Ids of the records whose `field` is `value`."""
        index = self._indexes.get(field)
        if index is None:
            index = {}
            for row in self.rows.values():
                index.setdefault(getattr(row, field), []).append(row.id)
            self._indexes[field] = index
        return index.get(value, [])


class Table(Generic[R]):
    """One session's view of a seed: its own records hide those of the seed, None hides a
    removed one.
    """

    __slots__ = ("_own", "_seed")

    def __init__(self, seed: Seed[R]) -> None:
        self._seed = seed
        self._own: dict[int, R | None] = {}

    def get(self, id: int) -> R | None:
        own = self._own
        return own[id] if id in own else self._seed.rows.get(id)

    def __getitem__(self, id: int) -> R:
        """Errors: KeyError if there is no such record."""
        record = self.get(id)
        if record is None:
            raise KeyError(id)
        return record

    def __iter__(self) -> Iterator[R]:
        """All records by id; new ones have the highest ids and come last."""
        own, rows = self._own, self._seed.rows
        if not own:
            yield from rows.values()
            return
        for id, row in rows.items():
            record = own.get(id) if id in own else row
            if record is not None:
                yield record
        yield from (record for id, record in own.items() if id not in rows and record is not None)

    def __len__(self) -> int:
        own, rows = self._own, self._seed.rows
        return len(rows) + sum((record is not None) - (id in rows) for id, record in own.items())

    def where(self, field: str, value: Any) -> list[R]:
        """The records whose `field` is `value`, by id."""
        own = self._own
        found = [self._seed.rows[id] for id in self._seed.ids(field, value) if id not in own]
        mine = [
            record
            for record in own.values()
            if record is not None and getattr(record, field) == value
        ]
        return sorted(found + mine, key=lambda record: record.id) if mine else found

    def first(self, field: str, value: Any) -> R | None:
        return next(iter(self.where(field, value)), None)

    def next_id(self) -> int:
        """Never one that was used before, removed records included."""
        return max(self._seed.last_id, max(self._own, default=0)) + 1

    def put(self, record: R) -> R:
        """Add the record, or replace the one of its id."""
        self._own = {**self._own, record.id: record}
        return record

    def remove(self, id: int) -> None:
        self._own = {**self._own, id: None}
