"""Text forms of amounts, days and addresses on the sites."""

from __future__ import annotations

import re
from datetime import date


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "untitled"


def money(cents: int) -> str:
    return f"${cents / 100:,.2f}"


def long_day(day: date) -> str:
    return f"{day:%B} {day.day}, {day.year}"


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
