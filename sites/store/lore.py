"""Word lists and price ranges of the shop's content, read from words.json."""

from __future__ import annotations

from dataclasses import dataclass

from sites.words import load


@dataclass(frozen=True)
class Kind:
    """A sort of product: name, icon, price range in dollars, option to choose, details, and a
    line on its use.
    """

    name: str
    icon: str
    low: int
    high: int
    option: str
    values: tuple[str, ...]
    details: tuple[tuple[str, tuple[str, ...]], ...]
    line: str


@dataclass(frozen=True)
class Shelf:
    """A category of the shop with its brands and kinds of product."""

    slug: str
    name: str
    blurb: str
    brands: tuple[str, ...]
    kinds: tuple[Kind, ...]


_WORDS = load(__file__)
SHELVES = tuple(
    Shelf(**{**row, "kinds": tuple(Kind(**kind) for kind in row["kinds"])})
    for row in _WORDS["categories"]
)
SERIES: tuple[str, ...] = _WORDS["series"]
OPENINGS: tuple[str, ...] = _WORDS["openings"]
MIDDLES: tuple[str, ...] = _WORDS["middles"]
CLOSINGS: tuple[str, ...] = _WORDS["closings"]
FIRST: tuple[str, ...] = _WORDS["first"]
LAST: tuple[str, ...] = _WORDS["last"]
CITIES: tuple[tuple[str, str, str], ...] = _WORDS["cities"]
STREETS: tuple[str, ...] = _WORDS["streets"]
REVIEW_TITLES: dict[int, tuple[str, ...]] = {
    int(rating): titles for rating, titles in _WORDS["review_titles"].items()
}
REVIEW_LINES: dict[int, tuple[str, ...]] = {
    int(rating): lines for rating, lines in _WORDS["review_lines"].items()
}
REVIEW_TOPICS: dict[str, str] = _WORDS["review_topics"]
ORDER_COMMENTS: tuple[str, ...] = _WORDS["order_comments"]
NICKNAMES: tuple[str, ...] = _WORDS["nicknames"]
SEARCH_TERMS: tuple[str, ...] = _WORDS["search_terms"]
