"""The shop and its administration with all their pages."""

from envs.webarena.sites.store import account
from envs.webarena.sites.store.admin import site as admin_site
from envs.webarena.sites.store.shop import site as shop_site

__all__ = ["account", "admin_site", "shop_site"]
