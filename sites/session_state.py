"""State of the four sites in one session: the generated content, which all sessions share, and
this session's changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from sites.forum import content as forum_content
from sites.forum.records import Forum
from sites.hub import content as hub_content
from sites.hub.records import Hub
from sites.overlay import fresh
from sites.store import content as store_content
from sites.store.records import Store

DEMO = 1  # id of the demo user of each site


@dataclass(frozen=True)
class Note:
    """A message that a site's next page shows, and the values typed into a refused form."""

    kind: str  # success or error
    text: str
    typed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class World:
    """One session's state of all sites. The shop and its administration share `store`.

    logins: site name -> id of the logged-in user, None when logged out.
    notes: site name -> the message that its next page shows.
    """

    store: Store
    forum: Forum
    hub: Hub
    logins: dict[str, int | None]
    notes: dict[str, Note] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """The generated content of all sites for one seed; sessions do not change it."""

    store: Store
    forum: Forum
    hub: Hub

    def world(self, login: bool = True) -> World:
        """Return a new session's state; with `login`, the demo user is logged in on each site."""
        sites = ("shopping", "shopping_admin", "reddit", "gitlab")
        logins: dict[str, int | None] = dict.fromkeys(sites, DEMO if login else None)
        return World(fresh(self.store), fresh(self.forum), fresh(self.hub), logins)


@lru_cache(maxsize=4)
def content(seed: int) -> Content:
    """Generate the content of a seed; the last four seeds' contents are cached."""
    return Content(
        store_content.generate(seed), forum_content.generate(seed), hub_content.generate(seed)
    )
