"""Markdown with text from others: names that add no markup, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envs.plain import plain


def literal(name: str) -> str:
    """Escape a name, on one line: it adds no tag, link, image or table cell to Markdown."""
    line = plain(" ".join(name.split()))
    return line.replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], *, right: int) -> str:
    """Return a Markdown table, padded for plain text. right: first right-aligned column, from 0."""
    rows = [head, *lines]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(head))]
    signs = ["<" if column < right else ">" for column in range(len(head))]
    rule = [
        "-" * w if s == "<" else "-" * (w - 1) + ":" for s, w in zip(signs, widths, strict=True)
    ]
    padded = [[f"{c:{s}{w}}" for c, s, w in zip(row, signs, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
