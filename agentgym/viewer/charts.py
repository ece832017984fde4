"""Charts as numbers for an SVG: scales and coordinates, no markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 26

Dot = tuple[float, float, str, str]  # x, y, step, value
Share = tuple[int, int, int]  # step, successes, episodes


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines over steps."""

    title: str
    lines: dict[str, list[Dot]]  # by name
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def line_chart(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, share: bool = False
) -> Chart | None:
    """Return the layout of a chart of lines; None without points.

    series: name -> (x, y), x ascending; share: y runs from 0 to 1, shown in percent.
    """
    points = [point for line_points in series.values() for point in line_points]
    if not points:
        return None
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = (0.0, 1.0) if share else _bounds([y for _, y in points])

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low) / (high - low)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    def label(y: float) -> str:
        return f"{100 * y:.3g} %" if share else f"{y:.4g}"

    lines = {
        name: [(*to_pixels(x, y), f"{x:g}", label(y)) for x, y in line_points]
        for name, line_points in series.items()
    }
    x_ticks = [(to_pixels(x, low)[0], f"{x:g}") for x in _ticks(low_x, high_x, whole=True)]
    y_ticks = [(to_pixels(low_x, y)[1], label(y)) for y in _ticks(low, high)]
    return Chart(title, lines, x_ticks, y_ticks)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Shares of successes by row over steps; a column may cover several steps."""

    title: str
    rows: dict[str, list[Share]]  # name -> (column, successes, episodes), empty columns left out
    columns: list[str]


def heat_map(
    title: str,
    rows: Mapping[str, Sequence[Share]],
    *,
    most_columns: int = 48,
) -> HeatMap | None:
    """Return the layout of a heat map; None without shares.

    rows: name -> shares; most_columns: with more steps than this, a column covers several.
    """
    steps = [step for shares in rows.values() for step, _, _ in shares]
    if not steps:
        return None
    low, high = min(steps), max(steps)
    wide = math.ceil((high - low + 1) / most_columns)  # steps in a column
    count = (high - low) // wide + 1
    columns = [_span(low + column * wide, wide) for column in range(count)]
    heat_rows = {}
    for name, shares in rows.items():
        sums = [[0, 0] for _ in columns]
        for step, won, num in shares:
            at = sums[(step - low) // wide]
            at[0], at[1] = at[0] + won, at[1] + num
        heat_rows[name] = [(column, won, num) for column, (won, num) in enumerate(sums) if num]
    return HeatMap(title, heat_rows, columns)


def _span(first: int, wide: int) -> str:
    return str(first) if wide == 1 else f"{first}-{first + wide - 1}"


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(0.0, *values), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return up to six round numbers from low to high; whole: integers only."""
    if high <= low:
        return [low]
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    if whole:
        step = max(1, round(step))
    first = math.ceil(low / step - 1e-9)
    return [
        first * step + index * step for index in range(int((high - first * step) / step + 1e-9) + 1)
    ]
