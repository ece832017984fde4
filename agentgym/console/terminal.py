"""Rich's console for text that came from elsewhere: only Rich's own colors and movements reach the
terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from envs.plain import plain


class PlainConsole(Console):
    """Console that makes all text plain: in tables, in bars, and between them."""

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments, **named):
            yield segment if segment.control else segment._replace(text=plain(segment.text))
