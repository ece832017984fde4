"""Pages of episodes from the index: the rows that match a query, in its order, and facet counts.

Values enter SQL only as parameters.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentgym.viewer.index import FACET_COLUMNS, SORTS, Index
from agentgym.viewer.query import AFTER, FACETS, BadQuery, Query, bounds, match_of

PAGE = 50  # episodes
FEW = 3_000  # below this many matches, sort them; else walk the index of the sort key
MOST_MATCHES = 10_000  # of a search that are counted; `is_more` marks a larger number


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a facet."""

    name: str
    count: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A page of episodes."""

    rows: list[sqlite3.Row]
    facets: dict[str, list[Value]]
    total: int
    is_more: bool  # the total is a lower bound
    following: str = ""  # Query.after of the next page; empty: there is none
    preceding: str = ""  # Query.before of the previous one


class Lists:
    """Pages of episodes from an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._counted: dict[str, list[tuple[Any, ...]]] = {}
        self._stamp = ""

    def page(self, query: Query, size: int = PAGE) -> Page:
        """Return one page of a query's episodes. Errors: BadQuery, IndexDamaged."""
        reader = self._index.reader
        steps = self._steps(reader)
        counted, is_more = self._counts(reader, query)
        facets, total = _facets(query, counted, steps)
        few = total < FEW and not is_more
        rows = _rows(reader, query, steps, size + 1, few=few)
        more, back = len(rows) > size, bool(query.before)
        rows = rows[:size]
        if back:
            rows.reverse()
        following = rows and (back or more)
        preceding = rows and (query.after or (back and more))
        return Page(
            rows,
            facets,
            total,
            is_more,
            _key(query, rows[-1]) if following else "",
            _key(query, rows[0]) if preceding else "",
        )

    def counts(self) -> list[tuple[Any, ...]]:
        """Return rows of FACET_COLUMNS' values and the number of episodes that have them."""
        return self._counts(self._index.reader, Query())[0]

    def all(self, query: Query, limit: int) -> list[sqlite3.Row]:
        """Return the first `limit` rows of a query, in its order. Errors: BadQuery."""
        reader = self._index.reader
        return _rows(reader, query.first(), self._steps(reader), limit)

    def neighbours(self, query: Query, row: sqlite3.Row) -> tuple[sqlite3.Row | None, ...]:
        """Return the rows (before, after) this one in a query's list; None at an end."""
        reader = self._index.reader
        steps, key = self._steps(reader), _key(query, row)
        whole = replace(query, after="", before="")
        sides = [
            _rows(reader, whole, steps, 1, before=key),
            _rows(reader, whole, steps, 1, after=key),
        ]
        return tuple(rows[0] if rows else None for rows in sides)

    def _steps(self, reader: sqlite3.Connection) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Return step -> (its name, its runs)."""
        names = {row["id"]: row["name"] for row in reader.execute("SELECT id, name FROM steps")}
        runs: dict[int, list[str]] = {}
        for row in reader.execute("SELECT step_id, run FROM run_steps"):
            runs.setdefault(row["step_id"], []).append(row["run"])
        return {step: (name, tuple(runs.get(step, ()))) for step, name in names.items()}

    def _counts(
        self, reader: sqlite3.Connection, query: Query
    ) -> tuple[list[tuple[Any, ...]], bool]:
        """Count episodes by combination of facet values, ignoring the chosen facets.

        Result: (rows of FACET_COLUMNS' values and a count, whether a search reached MOST_MATCHES).
        """
        stamp = self._index.stamp
        if stamp != self._stamp:
            self._counted, self._stamp = {}, stamp
        key = repr((query.ranges, query.item, query.words))
        if key not in self._counted:
            if len(self._counted) > 32:
                self._counted.clear()
            where, values = _where(query, {}, facets=False)
            columns, source = ", ".join(FACET_COLUMNS), "episodes"
            if query.words:
                source = f"(SELECT {columns} FROM episodes{where} LIMIT {MOST_MATCHES})"
                where = ""
            sql = f"SELECT {columns}, count(*) FROM {source}{where} GROUP BY {columns}"
            self._counted[key] = [tuple(row) for row in reader.execute(sql, values)]
        counted = self._counted[key]
        return counted, bool(query.words) and sum(row[-1] for row in counted) >= MOST_MATCHES


def _values(facet: str, row: tuple[Any, ...], steps: Mapping[int, Any]) -> tuple[str, ...]:
    """Return a row's values of a facet, as they appear in a URL."""
    if facet in ("run", "stage"):
        name, runs = steps.get(row[0], ("", ()))
        return runs if facet == "run" else (name,)
    value = row[FACET_COLUMNS.index(FACETS[facet])]
    if facet in ("success", "tokens_kept"):
        return ("yes" if value else "no",)
    return (str(value),)


def _facets(
    query: Query, counted: Sequence[tuple[Any, ...]], steps: Mapping[int, Any]
) -> tuple[dict[str, list[Value]], int]:
    """Return each facet's values, counted with only the other facets applied, and the total."""
    counts: dict[str, dict[str, int]] = {name: {} for name in FACETS}
    total = 0
    for row in counted:
        row_values = {name: _values(name, row, steps) for name in FACETS}
        failed = [
            name
            for name, chosen in query.facets.items()
            if not set(chosen).intersection(row_values[name])
        ]
        total += 0 if failed else row[-1]
        for name in FACETS if not failed else failed if len(failed) == 1 else ():
            for value in row_values[name]:
                counts[name][value] = counts[name].get(value, 0) + row[-1]
    by_facet = {}
    for name, of_facet in counts.items():
        chosen = query.facets.get(name, ())
        values = [Value(value, count, value in chosen) for value, count in of_facet.items()]
        values += [Value(value, 0, True) for value in chosen if value not in of_facet]
        by_facet[name] = sorted(values, key=lambda value: (-value.count, value.name))
    return by_facet, total


def _where(
    query: Query, steps: Mapping[int, tuple[str, tuple[str, ...]]], *, facets: bool = True
) -> tuple[str, list[Any]]:
    """Return a query's SQL condition, with facets or without, and its values. Errors: BadQuery."""
    conditions, values = [], []
    for name, chosen in query.facets.items() if facets else ():
        wanted: list[Any] = list(chosen)
        if name in ("run", "stage"):
            is_run = int(name == "run")
            wanted = [
                step
                for step, names in steps.items()
                if set(chosen).intersection(names[is_run] if is_run else (names[0],))
            ]
        elif name in ("success", "tokens_kept"):
            wanted = [int(value_text == "yes") for value_text in chosen]
        conditions.append(f"{FACETS[name]} IN ({', '.join('?' * len(wanted))})")
        values += wanted
    for name, text in query.ranges.items():
        for sign, bound in zip((">=", "<="), bounds(name, text), strict=True):
            if bound is not None:
                conditions.append(f"{name} {sign} ?")
                values.append(bound)
    if query.item:
        conditions.append("item = ?")
        values.append(query.item)
    if query.words:
        match = match_of(query.words)
        if not match:
            raise BadQuery(f"nothing to search for in {query.words[:40]!r}; give a word")
        conditions.append("id IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(match)
    return f" WHERE {' AND '.join(conditions)}" if conditions else "", values


def _rows(
    reader: sqlite3.Connection,
    query: Query,
    steps: Mapping[int, tuple[str, tuple[str, ...]]],
    limit: int,
    *,
    after: str = "",
    before: str = "",
    few: bool = False,
) -> list[sqlite3.Row]:
    """Return up to `limit` rows after the row `after`, or before `before`, the nearest first.

    after, before: see Query. few: so few rows match that all of them are sorted.
    """
    after, before = after or query.after, before or query.before
    key, up = SORTS[query.sort], query.up != bool(before)
    where, values = _where(query, steps)
    source = f"episodes INDEXED BY sort_{query.sort}"
    if few or query.item:  # unary plus keeps SQLite's planner from using the sort key's index
        index = "" if query.item or query.words else " INDEXED BY by_facet"
        where = f" WHERE id IN (SELECT id FROM episodes{index}{where})"
        source, key = "episodes", f"+{key}"
    if text := before or after:
        cursor = AFTER.fullmatch(text)
        assert cursor is not None
        sign = ">" if up else "<"
        where += f"{' AND' if where else ' WHERE'} ({key}, id) {sign} (?, ?)"
        values += [_number(query.sort, cursor["value"]), int(cursor["id"])]
    way = "ASC" if up else "DESC"
    sql = f"SELECT * FROM {source}{where} ORDER BY {key} {way}, id {way} LIMIT ?"
    return reader.execute(sql, [*values, limit]).fetchall()


def _number(sort: str, text: str) -> float | str:
    if sort == "item":
        return text
    try:
        return float(text)
    except ValueError:
        raise BadQuery(f"{text[:40]!r} is no number to go on from") from None


def _key(query: Query, row: sqlite3.Row) -> str:
    """Return a row's place in a query's order, for `Query.after` and `Query.before`."""
    value = -1e300 if row[query.sort] is None else row[query.sort]  # as SORTS has it
    return f"{value}~{row['id']}" if isinstance(value, str) else f"{value!r}~{row['id']}"
