"""The code host with all its pages."""

from sites.hub import members, merges, pages, repository, tracker
from sites.hub.site import site

__all__ = ["members", "merges", "pages", "repository", "site", "tracker"]
