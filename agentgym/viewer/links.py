"""Addresses of pages: of a server, and of files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from agentgym.viewer.query import Query


def _asked(**names: str) -> str:
    given = {name: value for name, value in names.items() if value}
    return f"?{urlencode(given)}" if given else ""


class Served:
    """Of a running server."""

    def home(self) -> str:
        return "/"

    def episodes(self, query: Query) -> str:
        return f"/episodes?{query.text}" if query.text else "/episodes"

    def episode(self, address: str, query: Query | None = None) -> str:
        """query: the list it was found in, for its neighbours."""
        return f"/e/{address}{_asked(list=query.text) if query else ''}"

    def text(self, address: str, turn: int, part: str) -> str:
        return f"/e/{address}/text/{turn}/{part}"

    def picture(self, address: str, turn: int) -> str:
        """address: of an episode, or `play/` and a game."""
        where = address if address.startswith("play/") else f"e/{address}"
        return f"/{where}/picture/{turn}"

    def group(self, address: str) -> str:
        """The samples of an episode's item, of one step of training or evaluation."""
        return f"/e/{address}/group"

    def item(self, item: str) -> str:
        return f"/item/{quote(item)}"

    def training(self, run: str) -> str:
        return f"/training{_asked(run=run)}"

    def compare(self, a: str, b: str) -> str:
        return f"/compare{_asked(a=a, b=b)}"

    def page(self, name: str) -> str:
        return f"/{name}"

    def static(self, name: str) -> str:
        return f"/static/{name}"


class Bundled:
    """Of files beside each other; only what was chosen has a place. root: the way up to them."""

    def __init__(
        self, episodes: Mapping[str, str], pictures: Mapping[tuple[str, int], str], root: str = ""
    ) -> None:
        """episodes: address -> file; pictures: (address, turn) -> file."""
        self._episodes, self._pictures, self._root = episodes, pictures, root

    def home(self) -> str:
        return f"{self._root}index.html"

    def episodes(self, query: Query) -> str:
        return self.home()

    def episode(self, address: str, query: Query | None = None) -> str:
        return f"{self._root}{self._episodes[address]}" if address in self._episodes else ""

    def text(self, address: str, turn: int, part: str) -> str:
        return ""

    def picture(self, address: str, turn: int) -> str:
        found = self._pictures.get((address, turn))
        return f"{self._root}{found}" if found else ""

    def group(self, address: str) -> str:
        return ""

    def item(self, item: str) -> str:
        return ""

    def training(self, run: str) -> str:
        return ""

    def compare(self, a: str, b: str) -> str:
        return ""

    def page(self, name: str) -> str:
        return self.home()

    def static(self, name: str) -> str:
        return f"{self._root}{name}"
