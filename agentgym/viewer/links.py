"""Addresses of pages: on a server, and in the files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from agentgym.viewer.query import Query


def asked(**names: str) -> str:
    """Return the part of an address from the `?` on; empty without a value."""
    pairs = {name: value for name, value in names.items() if value}
    return f"?{urlencode(pairs)}" if pairs else ""


class Served:
    """Addresses on a running server."""

    def home(self) -> str:
        return "/"

    def episodes(self, query: Query) -> str:
        return f"/episodes?{query.text}" if query.text else "/episodes"

    def episode(self, address: str, query: Query | None = None) -> str:
        """Return an episode's address; query: the list it is opened from, for its neighbors."""
        return f"/e/{address}{asked(list=query.text) if query else ''}"

    def text(self, address: str, turn: int, part: str) -> str:
        return f"/e/{address}/text/{turn}/{part}"

    def picture(self, address: str, turn: int) -> str:
        """Return a picture's address. address: of an episode, or `play/` and a game."""
        where = address if address.startswith("play/") else f"e/{address}"
        return f"/{where}/picture/{turn}"

    def group(self, address: str) -> str:
        """Return the address of the page with all samples of an episode's item in its step."""
        return f"/e/{address}/group"

    def item(self, item: str) -> str:
        return f"/item/{quote(item)}"

    def training(self, run: str) -> str:
        return f"/training{asked(run=run)}"

    def compare(self, a: str, b: str) -> str:
        return f"/compare{asked(a=a, b=b)}"

    def page(self, name: str) -> str:
        return f"/{name}"

    def static(self, name: str) -> str:
        return f"/static/{name}"


class Bundled:
    """Relative addresses within a bundle: its list of episodes for all general pages and lists,
    and an empty address for any other page or picture that the bundle does not have.
    """

    def __init__(
        self, episodes: Mapping[str, str], pictures: Mapping[tuple[str, int], str], root: str = ""
    ) -> None:
        """Map addresses of episodes and (address, turn) of pictures to files below `root`."""
        self._episodes, self._pictures, self._root = episodes, pictures, root

    def home(self) -> str:
        return f"{self._root}index.html"

    def episodes(self, query: Query) -> str:
        return self.home()

    def episode(self, address: str, query: Query | None = None) -> str:
        return f"{self._root}{self._episodes[address]}" if address in self._episodes else ""

    def picture(self, address: str, turn: int) -> str:
        file = self._pictures.get((address, turn))
        return f"{self._root}{file}" if file else ""

    def nothing(self, *_: object) -> str:
        """Return the empty address of a page that no bundle has."""
        return ""

    text = group = item = training = compare = nothing

    def page(self, name: str) -> str:
        return self.home()

    def static(self, name: str) -> str:
        return f"{self._root}{name}"
