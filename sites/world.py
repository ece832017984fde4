"""State of the four sites of one session: generated content, shared by all sessions, and the
session's changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from sites.forum import content as forum_content
from sites.forum.records import Forum
from sites.hub import content as hub_content
from sites.hub.records import Hub
from sites.store import content as store_content
from sites.store.records import Store


@dataclass(frozen=True)
class Note:
    """A message for the next page, and the values typed into a refused form."""

    kind: str
    text: str
    typed: Mapping[str, str]


@dataclass
class World:
    """The state behind one session. The shop and its administration share `store`.

    A login belongs to the session (its browser context is the only visitor): site name -> id of the
    user, None when logged out.
    """

    store: Store
    forum: Forum
    hub: Hub
    logins: dict[str, int | None]
    notes: dict[str, Note] = field(default_factory=dict)

    def note(self, site: str, kind: str, text: str, typed: Mapping[str, str] | None = None) -> None:
        self.notes[site] = Note(kind, text, typed or {})


@dataclass(frozen=True)
class Content:
    """Everything generated from one seed; never changed."""

    store: store_content.Content
    forum: forum_content.Content
    hub: hub_content.Content

    def world(self, login: bool = True) -> World:
        """A fresh world over this content; with `login` the demo users are logged in."""
        users = {
            "shopping": self.store.demo_customer,
            "shopping_admin": 1,
            "reddit": self.forum.demo_member,
            "gitlab": self.hub.demo_account,
        }
        logins = {site: user if login else None for site, user in users.items()}
        return World(self.store.fresh(), self.forum.fresh(), self.hub.fresh(), logins)


@lru_cache(maxsize=4)
def content(seed: int) -> Content:
    """The content of a seed, generated once per process."""
    return Content(
        store_content.generate(seed), forum_content.generate(seed), hub_content.generate(seed)
    )
