"""The shop and its administration with all their pages."""

from sites.store import account
from sites.store.admin import site as admin_site
from sites.store.shop import site as shop_site

__all__ = ["account", "admin_site", "shop_site"]
