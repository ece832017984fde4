"""The query of a list of episodes: all choices are in the address, as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlencode

from agentgym.viewer.index import RANGE_COLUMNS, SORTS

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
_NUMBER = r"-?\d+(?:\.\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})?(?P<to>\.\.)?(?P<high>{_NUMBER})?")
AFTER = re.compile(r"(?P<value>[^~]{0,300})~(?P<id>\d{1,15})", re.DOTALL)


class BadQuery(ValueError):
    """The address is not a valid query; the text states what was expected."""


@dataclass(frozen=True, slots=True)
class Query:
    """A choice of episodes, their order and the page."""

    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    words: str = ""
    sort: str = "began"
    up: bool = False  # smallest first
    after: str = ""  # value~id of the last row before the page,
    before: str = ""  # or of the first row behind it

    @classmethod
    def parse(cls, parameters: Sequence[tuple[str, str]]) -> Self:
        """Parse an address's names and values; unknown names are ignored. Errors: BadQuery."""
        facets: dict[str, tuple[str, ...]] = {}
        single: dict[str, str] = {}
        for name, value in parameters:
            if len(value) > MAX_WORDS:
                raise BadQuery(f"{name} is longer than {MAX_WORDS} characters")
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
        return cls(
            facets,
            ranges,
            single.get("item", ""),
            single.get("q", ""),
            sort,
            single.get("order") == "up",
            single.get("after", ""),
            single.get("before", ""),
        )

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
        """Return the first page with this value of a facet chosen, or no longer chosen."""
        chosen = self.facets.get(facet, ())
        left = tuple(other for other in chosen if other != value)
        values = left if value in chosen else (*chosen, value)
        facets = {name: others for name, others in self.facets.items() if name != facet}
        return self.first(facets={**facets, facet: values} if values else facets)

    def sorted_by(self, sort: str) -> Query:
        """Return the first page in this order, largest first, or reversed if it was so already."""
        return self.first(sort=sort, up=self.sort == sort and not self.up)

    def first(self, **changes: Any) -> Query:
        """Return the first page of the query with these changes."""
        return replace(self, after="", before="", **changes)


def bounds(name: str, text: str) -> tuple[float | None, float | None]:
    match = _RANGE.fullmatch(text)
    if not match or not (match["low"] or match["high"]) or (match["high"] and not match["to"]):
        raise BadQuery(
            f"{name} {text[:40]!r}: expected a number or a range, such as 3, 0.5.., ..10 or 2..8"
        )
    low, high = (None if match[end] is None else float(match[end]) for end in ("low", "high"))
    return low, high if match["to"] else low


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
