"""Four small web sites to act in: a shop, its administration, a forum and a code host, stateful
and reset for every session.
"""

from sites.local_server import SITES, TENANT_HEADER, SiteServer
from sites.session_state import World

__all__ = ["SITES", "TENANT_HEADER", "SiteServer", "World"]
