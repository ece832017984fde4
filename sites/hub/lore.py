"""Word lists and file templates of the code host's content, read from words.json."""

from __future__ import annotations

from dataclasses import dataclass

from sites.words import load


@dataclass(frozen=True)
class Plan:
    """A project: path, description, language, license, topics, and the parts that its issues
    mention.
    """

    path: str
    description: str
    language: str  # python, go or js
    license: str
    topics: tuple[str, ...]
    parts: tuple[str, ...]


_WORDS = load(__file__)
DEMO: tuple[str, str] = _WORDS["demo"]  # user name, full name
PEOPLE: tuple[tuple[str, str], ...] = _WORDS["people"]
PLANS = tuple(Plan(**row) for row in _WORDS["plans"])
LABELS: tuple[tuple[str, str, str], ...] = _WORDS["labels"]  # name, color, description
ISSUE_TITLES: tuple[tuple[str, str], ...] = _WORDS["issue_titles"]  # title, label
ISSUE_BODIES: tuple[str, ...] = _WORDS["issue_bodies"]
REMARKS: tuple[str, ...] = _WORDS["remarks"]
MERGE_TITLES: tuple[str, ...] = _WORDS["merge_titles"]
COMMITS: tuple[str, ...] = _WORDS["commits"]
BIOS: tuple[str, ...] = _WORDS["bios"]
STATUSES: tuple[str, ...] = _WORDS["statuses"]
# language -> path and text of files
SOURCES: dict[str, tuple[tuple[str, str], ...]] = _WORDS["sources"]
README: str = _WORDS["readme"]
CONTRIBUTING: str = _WORDS["contributing"]
CHANGELOG: str = _WORDS["changelog"]
