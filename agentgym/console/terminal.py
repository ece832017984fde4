"""Rich's console for text that came from elsewhere: its own colours and movements reach the
terminal, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from envs.plain import plain


class PlainConsole(Console):
    """Text is plain wherever it stands: in tables, in bars, in what is printed beside them."""

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments, **named):
            yield segment if segment.control else segment._replace(text=plain(segment.text))
