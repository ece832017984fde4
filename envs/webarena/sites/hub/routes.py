"""The code host with all its pages."""

from envs.webarena.sites.hub import members, merges, pages, repository, tracker
from envs.webarena.sites.hub.site import site

__all__ = ["members", "merges", "pages", "repository", "site", "tracker"]
