"""Templates, and the escaping of text from models and environments.

Text is escaped, invisible and directional characters are spelled out, long text is cut.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from agentgym.viewer.query import Query
from envs.plain import plain

FOLDER = Path(__file__).parent
STATIC = {  # the only files that are served
    "view.css": "text/css; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MAX_SHOWN = 20_000  # characters of a text on a page; the whole text has an address of its own
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff\u00ad]")  # characters of no width


class Links(Protocol):
    """Addresses of pages; an empty one means that there is no such page."""

    def home(self) -> str: ...
    def episodes(self, query: Query) -> str: ...
    def episode(self, address: str, query: Query | None = None) -> str: ...
    def text(self, address: str, turn: int, part: str) -> str: ...
    def picture(self, address: str, turn: int) -> str: ...
    def group(self, address: str) -> str: ...
    def item(self, item: str) -> str: ...
    def training(self, run: str) -> str: ...
    def compare(self, a: str, b: str) -> str: ...
    def page(self, name: str) -> str: ...
    def static(self, name: str) -> str: ...


class Pages:
    """Renderer of templates with one kind of links."""

    def __init__(self, links: Links, *, is_live: bool) -> None:
        """Use these links in all templates.

        is_live: the pages come from a running server, not from a bundle.
        """
        self._everywhere = {"link": links, "live": is_live}

    def render(self, template: str, **context: Any) -> str:
        return _environment().get_template(template).render(**self._everywhere, **context)

    @staticmethod
    def prepare() -> None:
        """Compile the templates now, so that the first page is fast."""
        for name in _environment().list_templates():
            _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment


def _visible(value: Any) -> Any:
    """Return text with its invisible characters spelled out; our own markup stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _spelled_out(value)
    return value


def _spelled_out(text: str) -> str:
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match.group()):04x}", plain(text))


def shown(text: object, limit: int = MAX_SHOWN) -> Markup:
    """Return untrusted text, cut and escaped, its invisible and control characters spelled out."""
    return escape(_spelled_out(str(text)[:limit]))


def marked(text: object, words: str, limit: int = MAX_SHOWN) -> Markup:
    """Return text as `shown` does, with the words of a search marked."""
    safe = shown(text, limit)
    terms = [re.escape(str(escape(term.strip('*"')))) for term in re.findall(r'"[^"]+"|\S+', words)]
    terms = [term for term in terms if re.search(r"\w", term)]
    if not terms:
        return safe
    # skip the entities that `escape` wrote, so that no mark splits one
    pattern = re.compile(rf"(&\w+;|&#\d+;)|({'|'.join(terms)})", re.IGNORECASE)

    def mark(match: re.Match[str]) -> str:
        return match[1] or f"<mark>{match[2]}</mark>"

    return Markup(pattern.sub(mark, str(safe)))  # noqa: S704 - all pieces are escaped


def is_cut(text: object, limit: int = MAX_SHOWN) -> bool:
    return len(str(text)) > limit


def number(value: float | None, digits: int = 3) -> str:
    """Format a number, rounded to `digits` decimals, without trailing zeros; None as a dash.

    A whole number has commas between thousands, another one at most six significant digits.
    """
    if value is None:
        return "–"
    rounded = round(value, digits)
    return f"{rounded:g}" if rounded != int(rounded) else f"{int(rounded):,}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def moment(seconds: float | None) -> str:
    """Format seconds since 1970 as local time; None and 0 as a dash."""
    if not seconds:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(text: object) -> str:
    count = len(str(text))
    return f"{count:,} characters"


FILTERS: dict[str, Callable[..., Any]] = {
    "shown": shown,
    "marked": marked,
    "is_cut": is_cut,
    "number": number,
    "percent": percent,
    "moment": moment,
    "size": size,
}
