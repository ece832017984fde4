"""The sites of the tasks: embedded ones, which the first session starts with the browser, or ones
that run elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from envs.webarena.browser import Chromium
from envs.webarena.chromium import switches
from envs.webarena.evaluators import Helpers
from envs.webarena.helpers import SiteHelpers, StateHelpers
from envs.webarena.tabs import Allowed


class Shared:
    """One Place for all sessions: the first `get` makes it, `stop` ends it, and a later `get` makes
    a new one.
    """

    def __init__(self, make: Callable[[], Place]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._place: Place | None = None

    def get(self) -> Place:
        with self._lock:
            if self._place is None:
                self._place = self._make()
            return self._place

    def stop(self) -> None:
        with self._lock:
            current, self._place = self._place, None
        if current is not None:
            current.stop()


class Place:
    """Sites that run elsewhere, for example WebArena's own, and a browser that reaches only these.
    All sessions share the sites' state.
    """

    def __init__(
        self, executable: str, concurrency: int, sites: Mapping[str, str], port: int = 0
    ) -> None:
        """Check the sites (name -> URL); the browser starts with the first session.

        executable: the browser's path. concurrency: see `Chromium.turn`.
        port: of a server on this machine that stands for all sites; 0 means there is none.
        Errors: ValueError if a site has no http(s) URL.
        """
        self._sites = sites
        self.allowed = Allowed(list(sites.values()))
        reached = sorted({_host_port(url) for url in sites.values()})
        local = f"127.0.0.1:{port}" if port else ""
        routes = switches((address, local or address) for address in reached)
        self.chromium = Chromium(executable, routes, concurrency)

    def open(self) -> Mapping[str, str]:
        """Begin a session; return the headers that each of its requests must have (none here)."""
        return {}

    def close(self, headers: Mapping[str, str]) -> None: ...

    def helpers(self, headers: Mapping[str, str]) -> Helpers:
        return SiteHelpers(self._sites)

    def stop(self) -> None:
        self.chromium.stop()


class Embedded(Place):
    """The embedded sites, served from `__init__` to `stop`; each session changes its own copy."""

    def __init__(self, executable: str, concurrency: int, seed: int) -> None:
        import sites

        self._header = sites.TENANT_HEADER
        self._server = sites.SiteServer(seed)
        super().__init__(executable, concurrency, self.addresses(), self._server.start())

    @staticmethod
    def addresses() -> dict[str, str]:
        import sites

        return {name: f"http://{host}" for name, host in sites.SITES.items()}

    def open(self) -> Mapping[str, str]:
        return {self._header: self._server.open_tenant()}

    def close(self, headers: Mapping[str, str]) -> None:
        self._server.close_tenant(headers[self._header])

    def helpers(self, headers: Mapping[str, str]) -> Helpers:
        from sites import queries

        return StateHelpers(self._server.state(headers[self._header]), queries)

    def stop(self) -> None:
        super().stop()
        self._server.stop()


def _host_port(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
