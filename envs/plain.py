"""Safe forms of text from models, pages, servers and files, in which terminal control characters
are escaped or lone surrogates are replaced.
"""

from __future__ import annotations

import logging
import re

# C0 except tab and line feed, DEL, C1; line separators; direction marks and overrides, which can
# make a line look like a different one; surrogates
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_HALVES = re.compile("[\ud800-\udfff]")


def plain(text: str) -> str:
    """Return the text with control characters, direction marks and surrogates escaped (`\\x1b`).
    Line feeds and tabs stay, Windows' line ends become line feeds.
    """
    return _STEERING.sub(_spelled, text.replace("\r\n", "\n"))


def whole(text: str) -> str:
    """Return the text with U+FFFD in place of each lone surrogate, which no tokenizer, file or
    socket accepts.
    """
    return _HALVES.sub("\ufffd", text)


def _spelled(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class PlainFormatter(logging.Formatter):
    """A formatter that escapes control characters in another formatter's output, tracebacks
    included.
    """

    def __init__(self, inner: logging.Formatter | str | None = None) -> None:
        """Wrap `inner`, a formatter or a format string; None formats the message alone."""
        super().__init__()
        self._inner = inner if isinstance(inner, logging.Formatter) else logging.Formatter(inner)

    def format(self, record: logging.LogRecord) -> str:
        return plain(self._inner.format(record))


def log_to_stderr(level: int, form: str) -> None:
    """Configure the root logger as `logging.basicConfig` does, with a PlainFormatter of `form`."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
