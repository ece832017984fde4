"""HTML pages from templates: the viewer's, those of its bundles, and reports in a single file.

Text from models and environments is escaped. Invisible characters and direction marks are shown as
their code, for example `\\u200b`. All pages share one stylesheet.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from envs.plain import plain

FOLDER = Path(__file__).parent
STATIC = {  # the only files that are served
    "view.css": "text/css; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MAX_SHOWN = 20_000  # characters of a text on a page; the whole text has an address of its own
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff\u00ad]")  # characters of no width


class Pages:
    """Renderer of the viewer's page templates, for a running server or for a bundle of files."""

    def __init__(self, links: object, *, is_live: bool) -> None:
        """Set the variables of all pages. links: has a method for each kind of page, which returns
        its address, or "" if there is no page. is_live: the pages are a running server's; false:
        a bundle's.
        """
        self._everywhere = {"link": links, "live": is_live}

    def render(self, template: str, **context: Any) -> str:
        return _environment().get_template(template).render(**self._everywhere, **context)

    @staticmethod
    def prepare() -> None:
        """Compile all templates now, so that the first page is fast."""
        for name in _environment().list_templates():
            _environment().get_template(name)


def single_page(template: str, **context: Any) -> bytes:
    """Return a template, rendered with the variables `context`, as an HTML page in one file, UTF-8,
    style included. It has no script, loads nothing and escapes all text; its content security
    policy would block scripts and requests, too.
    """
    style = (FOLDER / "static/view.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    own = {"style": Markup(style), "style_digest": digest}  # noqa: S704 - our own file
    return _environment().get_template(template).render(**own, **context).encode()


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
    """Return a string with invisible characters shown as codes; other values, Markup too, as is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _spelled_out(value)
    return value


def _spelled_out(text: str) -> str:
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match.group()):04x}", plain(text))


def shown(text: object, limit: int = MAX_SHOWN) -> Markup:
    """Return untrusted text as HTML: cut to `limit` characters and escaped, with invisible and
    control characters shown as codes.
    """
    return escape(_spelled_out(str(text)[:limit]))


def marked(text: object, words: str, limit: int = MAX_SHOWN) -> Markup:
    """Return `shown(text)` with a search's words and "quoted phrases" in <mark>, ignoring case."""
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


def percent(share: float | None, unit: str = " %") -> str:
    return "–" if share is None else f"{100 * share:.1f}{unit}"


def points(difference: float) -> str:
    """Format a difference of shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-", "−")


def estimate(row: Mapping[str, float]) -> str:
    """Format a share (row: `mean`, `low`, `high`) in percent: `50.0 [40.0, 60.0]`."""
    mean, low, high = (percent(row[part], "") for part in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def spread(row: Mapping[str, Any]) -> str:
    """Format a share (row: `mean`, `sd` or None) in percent: `50.0 ± 2.0`."""
    deviation = "" if row["sd"] is None else f" ± {100 * row['sd']:.1f}"
    return f"{100 * row['mean']:.1f}{deviation}"


def gain(row: Mapping[str, float]) -> str:
    """Format a difference (row: `mean`, `low`, `high`) in points: `+2.0 [−1.0, +5.0]`."""
    return f"{points(row['mean'])} [{points(row['low'])}, {points(row['high'])}]"


def label(key: str) -> str:
    """Return a metric's display name, for example `pass@4` for `pass_at_4`, `pass^4` for
    `pass_hat_4`.
    """
    return key.replace("_at_", "@").replace("_hat_", "^")


def moment(seconds: float | None) -> str:
    """Format seconds since 1970 as local time; None and 0 as a dash."""
    if not seconds:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(text: object) -> str:
    return f"{len(str(text)):,} characters"


def picture_data(png: bytes) -> str:
    """Return the PNG in base64, for a `data:` address in a page."""
    return base64.b64encode(png).decode()


FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(shown, marked, is_cut, number, percent, points, estimate, gain, label, moment),
        *(duration, size, picture_data),
    )
}
