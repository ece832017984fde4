"""Lists of episodes: a query, which a page's address contains whole, and the pages of its matches.

Values enter SQL only as parameters.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self
from urllib.parse import urlencode

from agentgym.viewer.index import FACET_COLUMNS, RANGE_COLUMNS, SORTS, Index

MAX_WORDS, MAX_VALUE = 400, 200  # characters
# facet -> its column; `run` and `stage` go through the step
FACETS = {
    "run": "step_id",
    "stage": "step_id",
    "env": "env",
    "split": "split",
    "family": "family",
    "status": "status",
    "success": "success",
    "excluded": "excluded",
    "tokens_kept": "kept",
}
SINGLE = (*RANGE_COLUMNS, "item", "q", "sort", "order", "after", "before")
_NUMBER = r"-?\d+(?:\.\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})?(?P<to>\.\.)?(?P<high>{_NUMBER})?")
AFTER = re.compile(r"(?P<value>[^~]{0,300})~(?P<id>\d{1,15})", re.DOTALL)


class BadQuery(ValueError):
    """Error for an address that is not a valid query. Its text states what was expected."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query for a list of episodes: filters, search words, order, and which page of the list."""

    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    words: str = ""
    sort: str = "began"
    up: bool = False  # smallest first
    after: str = ""  # `value~id` of the row after which the page begins,
    before: str = ""  # or of the row before which it ends; at most one of them is used

    @classmethod
    def parse(cls, parameters: Sequence[tuple[str, str]]) -> Self:
        """Parse an address's names and values; unknown names are ignored.
        Errors: BadQuery for a bad range, success, sort key, `after` or `before`, or a value too
        long.
        """
        facets: dict[str, tuple[str, ...]] = {}
        single: dict[str, str] = {}
        for name, value in parameters:
            if len(value) > MAX_WORDS:
                raise BadQuery(f"{name} is longer than {MAX_WORDS} characters")
            if name == "success" and value not in ("yes", "no"):
                raise BadQuery(f"success {value[:40]!r} is neither yes nor no")
            if name in FACETS:
                facets[name] = (*facets.get(name, ()), value[:MAX_VALUE])
            elif value:
                single[name] = value
        ranges = {name: single[name] for name in RANGE_COLUMNS if name in single}
        for name, value in ranges.items():
            bounds(name, value)
        sort = single.get("sort", "began")
        if sort not in SORTS:
            raise BadQuery(f"sort {sort[:40]!r} is none of {', '.join(SORTS)}")
        for name in ("after", "before"):
            if name in single and not AFTER.fullmatch(single[name]):
                raise BadQuery(
                    f"{name} {single[name][:40]!r} names no row; begin at the first page"
                )
        names = ("item", "q", "after", "before")
        item, words, after, before = (single.get(name, "") for name in names)
        return cls(facets, ranges, item, words, sort, single.get("order") == "up", after, before)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the names and values for an address; `parse` turns them into an equal query."""
        single = {
            **self.ranges,
            "item": self.item,
            "q": self.words,
            "sort": "" if self.sort == "began" else self.sort,
            "order": "up" if self.up else "",
            "after": self.after,
            "before": self.before,
        }
        chosen = [(name, value) for name, values in self.facets.items() for value in values]
        return chosen + [(name, value) for name, value in single.items() if value]

    @property
    def text(self) -> str:
        """The part of an address after the `?`."""
        return urlencode(self.pairs())

    def toggled(self, facet: str, value: str) -> Query:
        """Return the query's first page with a facet's value added, or removed if it was chosen."""
        chosen = self.facets.get(facet, ())
        left = tuple(other for other in chosen if other != value)
        values = left if value in chosen else (*chosen, value)
        facets = {name: others for name, others in self.facets.items() if name != facet}
        return self.first(facets={**facets, facet: values} if values else facets)

    def sorted_by(self, sort: str) -> Query:
        """Return the first page sorted by `sort`, largest first; if that is its order already,
        smallest first.
        """
        return self.first(sort=sort, up=self.sort == sort and not self.up)

    def first(self, **changes: Any) -> Query:
        """Return a copy of this query that asks for the first page. changes: fields to replace."""
        return replace(self, after="", before="", **changes)


def bounds(name: str, text: str) -> tuple[float | None, float | None]:
    match = _RANGE.fullmatch(text)
    if not match or not (match["low"] or match["high"]) or (match["high"] and not match["to"]):
        raise BadQuery(
            f"{name} {text[:40]!r}: expected a number or a range, such as 3, 0.5.., ..10 or 2..8"
        )
    low, high = (None if match[end] is None else float(match[end]) for end in ("low", "high"))
    return low, high if match["to"] else low


def asked(**names: str) -> str:
    """Return `?name=value&...` for the names with a value; empty if none has one."""
    pairs = {name: value for name, value in names.items() if value}
    return f"?{urlencode(pairs)}" if pairs else ""


def match_of(words: str) -> str:
    """Return the FTS5 expression that requires every word and every "phrase"; empty without words.

    A word that ends in * matches as a prefix. The rest of FTS5's syntax is quoted.
    """
    terms = []
    for match in re.finditer(r'"([^"]*)"?|(\S+)', words):
        phrase = match[1] if match[1] is not None else match[2]
        prefix = match[1] is None and phrase.endswith("*")
        if re.search(r"\w", phrase):
            quoted = (phrase.rstrip("*") if prefix else phrase).replace('"', '""')
            terms.append(f'"{quoted}"*' if prefix else f'"{quoted}"')
    return " ".join(terms)


PAGE = 50  # episodes
FEW = 3_000  # below this many matches, sort them; else walk the index of the sort key
MOST_MATCHES = 10_000  # of a search that are counted; `is_more` marks a larger number


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a facet, with its number of episodes."""

    name: str
    count: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a query's episodes, and the facets to filter them by."""

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
        """Return a query's page of up to `size` episodes. Errors: BadQuery, IndexDamaged."""
        reader, steps = self._index.reader, self._steps()
        counted, is_more = self._counts(query)
        facets, total = _facets(query, counted, steps)
        few = total < FEW and not is_more
        rows = _rows(reader, query, steps, size + 1, few=few)
        more, back = len(rows) > size, bool(query.before)
        rows = rows[:size][:: -1 if back else 1]
        following = _key(query, rows[-1]) if rows and (back or more) else ""
        preceding = _key(query, rows[0]) if rows and (query.after or (back and more)) else ""
        return Page(rows, facets, total, is_more, following, preceding)

    def counts(self) -> list[tuple[Any, ...]]:
        """Return a tuple per combination of FACET_COLUMNS: its values, its number of episodes."""
        return self._counts(Query())[0]

    def runs(self, beginnings: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the runs that begin with one of `beginnings`, sorted."""
        names = {run for _, runs in self._steps().values() for run in runs}
        return tuple(sorted(name for name in names if name.startswith(beginnings)))

    def all(self, query: Query, limit: int) -> list[sqlite3.Row]:
        """Return the first `limit` rows of a query, in its order. Errors: BadQuery."""
        return _rows(self._index.reader, query.first(), self._steps(), limit)

    def neighbours(self, query: Query, row: sqlite3.Row) -> tuple[sqlite3.Row | None, ...]:
        """Return the rows (before, after) `row` in a query's list; None at an end."""
        next_row = partial(_rows, self._index.reader, query.first(), self._steps(), 1)
        sides = next_row(before=_key(query, row)), next_row(after=_key(query, row))
        return tuple(rows[0] if rows else None for rows in sides)

    def _steps(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Return id of a step -> (its name, names of its runs)."""
        reader = self._index.reader
        names = {row["id"]: row["name"] for row in reader.execute("SELECT id, name FROM steps")}
        runs: dict[int, list[str]] = {}
        for row in reader.execute("SELECT step_id, run FROM run_steps"):
            runs.setdefault(row["step_id"], []).append(row["run"])
        return {step: (name, tuple(runs.get(step, ()))) for step, name in names.items()}

    def _counts(self, query: Query) -> tuple[list[tuple[Any, ...]], bool]:
        """Count episodes by combination of facet values, ignoring the chosen facets.
        Result: (rows of FACET_COLUMNS' values and a count, whether a search reached MOST_MATCHES).
        It is cached until the index changes. Errors: BadQuery for a search without a word.
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
            rows = self._index.reader.execute(sql, values)
            self._counted[key] = [tuple(row) for row in rows]
        counted = self._counted[key]
        return counted, bool(query.words) and sum(row[-1] for row in counted) >= MOST_MATCHES


def _values(facet: str, row: tuple[Any, ...], steps: Mapping[int, Any]) -> tuple[str, ...]:
    """Return a facet's values, as in a URL, for a row of `Lists._counts`. steps: `Lists._steps`."""
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
    """Return (facet -> its values, number of episodes that match the query).
    A value's count applies the chosen values of the other facets alone. Chosen values are always
    there, also with count 0. counted: rows of `Lists._counts`; steps: see `Lists._steps`.
    """
    counts: dict[str, dict[str, int]] = {name: {} for name in FACETS}
    total = 0
    for row in counted:
        row_values = {name: _values(name, row, steps) for name in FACETS}
        failed = [n for n, chosen in query.facets.items() if not {*chosen} & {*row_values[n]}]
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
    """Return a query's WHERE clause (may be empty) and its values. Errors: BadQuery.
    steps: see `Lists._steps`. facets: False leaves the query's facets out.
    """
    conditions, values = [], []
    for name, chosen in query.facets.items() if facets else ():
        wanted: list[Any] = list(chosen)
        if name in ("run", "stage"):
            wanted = [step for step in steps if {*chosen} & {*_values(name, (step,), steps)}]
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
    """Return up to `limit` matches of a query that follow its row `after` or precede its `before`.

    after, before: override those of the query; with `before` the rows are in reverse order.
    few: sort all matches, which is faster if there are few. Errors: BadQuery.
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
    """Return a row as `value~id` of the query's order, for `Query.after` and `Query.before`."""
    value = -1e300 if row[query.sort] is None else row[query.sort]  # as in SORTS
    return f"{value}~{row['id']}" if isinstance(value, str) else f"{value!r}~{row['id']}"
