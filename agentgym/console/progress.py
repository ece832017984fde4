"""Progress bars for a terminal; plain lines without one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from envs.plain import plain

PLAIN_EVERY_S = 20.0


class Bars:
    """Progress bars in a `with` block, one active at a time; finished ones stay visible."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("  {task.description:<34}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._what, self._note, self._total, self._count, self._said_at = "", "", 0, 0, 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def start(self, what: str, total: int) -> None:
        """Start a bar of `total` units, labeled `what`; without a terminal nothing is shown."""
        self._what, self._note, self._total = what, "", total
        self._count, self._said_at = 0, time.monotonic()
        if self._console.is_terminal:
            self._task = self._bars.add_task(what, total=total, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        """Advance the bar; an empty note keeps the last one. Without a terminal: print a line with
        the count and this note, at most one in 20 s.
        """
        self._count += count
        if self._task is not None:
            self._note = note or self._note
            self._bars.update(self._task, advance=count, note=self._note)
        elif not self._console.is_terminal and time.monotonic() - self._said_at > PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(
                f"  {self._what}: {self._count}/{self._total} {note}", highlight=False
            )


class PlainConsole(Console):
    """Console that escapes control characters in everything it prints, also in tables and bars."""

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments, **named):
            yield segment if segment.control else segment._replace(text=plain(segment.text))
