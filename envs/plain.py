"""Text of models, pages, servers and files: what would steer a terminal is spelled out, what is no
text is replaced.
"""

from __future__ import annotations

import logging
import re

# C0 but tab and line feed, DEL, C1; marks and overrides of direction, which make a line read as
# another; separators of lines
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_HALVES = re.compile("[\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with control characters as `\\x1b` and the like; line feeds and tabs stay,
    Windows' line ends become line feeds.
    """
    return _STEERING.sub(_spelled, text.replace("\r\n", "\n"))


def whole(text: str) -> str:
    """The text with U+FFFD in place of each half of a surrogate pair, which no tokenizer, file or
    socket takes.
    """
    return _HALVES.sub("\ufffd", text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class PlainFormatter(logging.Formatter):
    """What another formatter makes of a record, tracebacks included, without anything that
    steers a terminal.
    """

    def __init__(self, inner: logging.Formatter | str | None = None) -> None:
        """inner: a formatter or a format string; None: the message alone."""
        super().__init__()
        self._inner = inner if isinstance(inner, logging.Formatter) else logging.Formatter(inner)

    def format(self, record: logging.LogRecord) -> str:
        return plain(self._inner.format(record))


def log_to_stderr(level: int, form: str) -> None:
    """As `logging.basicConfig`, plain."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
