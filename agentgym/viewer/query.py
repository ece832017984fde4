"""What a list of episodes shows: everything that was chosen is in the address, as text."""

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
    """An address that asks for what there is not; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class Query:
    """What was chosen."""

    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    words: str = ""
    sort: str = "began"
    up: bool = False  # smallest first
    after: str = ""  # value~id of the row before the page,
    before: str = ""  # or of the one behind it

    @classmethod
    def parse(cls, given: Sequence[tuple[str, str]]) -> Self:
        """From an address's names and values, whichever it knows. Errors: BadQuery."""
        facets: dict[str, tuple[str, ...]] = {}
        single: dict[str, str] = {}
        for name, value in given:
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
        """For an address; `parse` gives an equal query back."""
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
        """What stands behind the `?` of an address."""
        return urlencode(self.pairs())

    def toggled(self, facet: str, value: str) -> Query:
        """With this value of a facet chosen, or no longer; at the first page."""
        chosen = self.facets.get(facet, ())
        left = tuple(each for each in chosen if each != value)
        values = left if value in chosen else (*chosen, value)
        facets = {name: own for name, own in self.facets.items() if name != facet}
        return self.first(facets={**facets, facet: values} if values else facets)

    def sorted_by(self, sort: str) -> Query:
        """The other way round where it is sorted by that already."""
        return self.first(sort=sort, up=self.sort == sort and not self.up)

    def first(self, **changes: Any) -> Query:
        """At the first page."""
        return replace(self, after="", before="", **changes)

    @property
    def is_plain(self) -> bool:
        """Whether facets alone are chosen: counts of them are then known for the whole index."""
        return not (self.ranges or self.item or self.words)


def bounds(name: str, text: str) -> tuple[float | None, float | None]:
    found = _RANGE.fullmatch(text)
    if not found or not (found["low"] or found["high"]) or (found["high"] and not found["to"]):
        raise BadQuery(
            f"{name} {text[:40]!r}: expected a number or a range, such as 3, 0.5.., ..10 or 2..8"
        )
    low, high = (None if found[end] is None else float(found[end]) for end in ("low", "high"))
    return low, high if found["to"] else low


def match_of(words: str) -> str:
    """As FTS5 reads it: every word, and every "phrase", must be there; a word that ends in * may
    go on. Nothing else of FTS5's language can be said.
    """
    terms = []
    for found in re.finditer(r'"([^"]*)"?|(\S+)', words):
        phrase = found[1] if found[1] is not None else found[2]
        prefix = found[1] is None and phrase.endswith("*")
        if re.search(r"\w", phrase):
            quoted = (phrase.rstrip("*") if prefix else phrase).replace('"', '""')
            terms.append(f'"{quoted}"*' if prefix else f'"{quoted}"')
    return " ".join(terms)
