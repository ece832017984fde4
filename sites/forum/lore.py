"""Word lists of the forum's content, read from words.json."""

from __future__ import annotations

from dataclasses import dataclass

from sites.words import load


@dataclass(frozen=True)
class Topic:
    """A forum: title templates with {a} and {b} drawn from its word lists, and the texts of its
    posts and comments.
    """

    name: str
    title: str
    description: str
    rules: str
    titles: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    bodies: tuple[str, ...]
    comments: tuple[str, ...]


_WORDS = load(__file__)
TOPICS = tuple(Topic(**row) for row in _WORDS["topics"])
NAMES: tuple[str, ...] = _WORDS["names"]
BIOS: tuple[str, ...] = _WORDS["bios"]
CLOSERS: tuple[str, ...] = _WORDS["closers"]
REPLIES: tuple[str, ...] = _WORDS["replies"]
DOMAINS: tuple[str, ...] = _WORDS["domains"]
