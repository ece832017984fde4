"""A run's training as a whole: items learned, forgotten or never solved, and how its episodes
changed, as charts: scales and coordinates for an SVG, no markup.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 26

Dot = tuple[float, float, str, str]  # x, y, step, value
Share = tuple[int, int, int]  # step, successes, episodes


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines over optimizer steps, laid out in pixels of an SVG."""

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
    """Successes per row over optimizer steps; a column may cover several steps."""

    title: str
    rows: dict[str, list[Share]]  # name -> (column, successes, episodes), empty columns left out
    columns: list[str]


def heat_map(
    title: str, rows: Mapping[str, Sequence[Share]], *, most_columns: int = 48
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
    first_steps = range(low, low + count * wide, wide)
    columns = [str(s) if wide == 1 else f"{s}-{s + wide - 1}" for s in first_steps]
    heat_rows = {}
    for name, shares in rows.items():
        sums = [[0, 0] for _ in columns]
        for step, won, num in shares:
            at = sums[(step - low) // wide]
            at[0], at[1] = at[0] + won, at[1] + num
        heat_rows[name] = [(column, won, num) for column, (won, num) in enumerate(sums) if num]
    return HeatMap(title, heat_rows, columns)


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
    first = math.ceil(low / step - 1e-9) * step
    return [first + index * step for index in range(int((high - first) / step + 1e-9) + 1)]


MOST_ITEMS = 80  # rows of the map of items, for those played at the most steps, at least two
MOST_FAMILIES = 60
SAMPLES = ("every sample", "some samples", "no sample")
KINDS = {
    "learned": "failed when first played, solved when last",
    "forgotten": "solved before, not when last played",
    "never solved": "played twice or more, never solved",
    "always solved": "solved every time",
    "changing": "sometimes solved, and as at first when last",
    **{f"solved by {samples}": "played at one step so far" for samples in SAMPLES},
}


@dataclass(frozen=True)
class Training:
    """The content of a run's training page."""

    items: dict[str, list[str]]  # kind -> items
    maps: list[HeatMap]
    charts: list[Chart]
    episodes: int


def training_of(reader: sqlite3.Connection, step_ids: Sequence[int]) -> Training:
    """Return the content of the training page. step_ids: ids in the index of a run's steps.
    It covers optimizer step 1 and later; items and maps only sampled episodes of split train.
    """
    marks = ", ".join("?" * len(step_ids))
    where = f"step_id IN ({marks}) AND file = 0 AND at >= 1"
    train = f"{where} AND split = 'train' AND temperature > 0"
    shares = reader.execute(
        f"SELECT item, family, at, sum(success) AS won, count(*) AS n FROM episodes"
        f" WHERE {train} AND reward IS NOT NULL GROUP BY item, family, at ORDER BY at",
        list(step_ids),
    ).fetchall()
    by_item, by_family = _by("item", shares), _by("family", shares)
    often = [item for item, visits in by_item.items() if len(visits) > 1]
    often = sorted(often, key=lambda item: (-len(by_item[item]), item))[:MOST_ITEMS]
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for item, visits in by_item.items():
        kinds[kind_of(visits)].append(item)
    order = {item: rank for rank, members in enumerate(kinds.values()) for item in members}
    families = dict(sorted(by_family.items())[:MOST_FAMILIES])
    rows = {item: by_item[item] for item in sorted(often, key=lambda item: (order[item], item))}
    maps = [
        heat_map("success by family", families) if set(by_family) - {""} else None,
        heat_map("success by item", rows),
    ]
    charts = _charts(reader, train, where, list(step_ids))
    shown = [heat for heat in maps if heat is not None]
    return Training(kinds, shown, charts, sum(row["n"] for row in shares))


def kind_of(visits: Sequence[Share]) -> str:
    """Return the kind (see KINDS) of an item. visits: one or more, in order of training."""
    solved = [won > 0 for _, won, _ in visits]
    if len(solved) == 1:
        _, won, num = visits[0]
        return f"solved by {SAMPLES[0 if won == num else 1 if won else 2]}"
    if not any(solved):
        return "never solved"
    if all(solved):
        return "always solved"
    if not solved[-1]:
        return "forgotten"
    return "learned" if not solved[0] else "changing"


def _by(name: str, shares: Sequence[sqlite3.Row]) -> dict[str, list[Share]]:
    by_key: dict[str, dict[int, list[int]]] = {}
    for row in shares:
        at = by_key.setdefault(row[name], {}).setdefault(row["at"], [0, 0])
        at[0], at[1] = at[0] + row["won"], at[1] + row["n"]
    return {key: [(at, won, n) for at, (won, n) in sums.items()] for key, sums in by_key.items()}


def _agreement(reader: sqlite3.Connection, train: str, values: list[int]) -> Chart | None:
    """Return the chart of the shares of items that every, some or no sample solved."""
    agreed = reader.execute(
        "SELECT at, avg(won = n) AS every, avg(won > 0 AND won < n) AS part, avg(won = 0) AS no"
        " FROM (SELECT at, sum(success) AS won, count(*) AS n FROM episodes"
        f" WHERE {train} AND reward IS NOT NULL GROUP BY at, item) WHERE n > 1 GROUP BY at",
        values,
    ).fetchall()
    columns = zip(("every", "part", "no"), SAMPLES, strict=True)
    points = {title: [(row["at"], row[name]) for row in agreed] for name, title in columns}
    return line_chart("items solved by ...", points, share=True)


def _charts(reader: sqlite3.Connection, train: str, where: str, values: list[int]) -> list[Chart]:
    steps = reader.execute(
        "SELECT at, avg(CASE WHEN reward IS NOT NULL THEN success END) AS success,"
        " avg(turns) AS turns, avg(said) AS sampled, max(max_turns) AS horizon,"
        " max(at - 1 - oldest) AS staleness, avg(1.0 * invalid / max(turns, 1)) AS invalid,"
        f" avg(excluded != '') AS excluded FROM episodes WHERE {train} GROUP BY at ORDER BY at",
        values,
    ).fetchall()
    evaluated = reader.execute(
        "SELECT at, avg(success) AS success FROM episodes"
        f" WHERE {where} AND split != 'train' AND reward IS NOT NULL GROUP BY at ORDER BY at",
        values,
    ).fetchall()
    statuses = reader.execute(
        f"SELECT at, status, count(*) AS n FROM episodes WHERE {train} GROUP BY at, status"
        " ORDER BY at",
        values,
    ).fetchall()

    def of(name: str) -> list[tuple[float, float]]:
        return [(row["at"], row[name]) for row in steps if row[name] is not None]

    totals = Counter[int]()
    for row in statuses:
        totals[row["at"]] += row["n"]
    shares: dict[str, dict[int, float]] = {row["status"]: {} for row in statuses}
    for row in statuses:
        shares[row["status"]][row["at"]] = row["n"] / totals[row["at"]]
    endings = {n: [(at, by_at.get(at, 0.0)) for at in totals] for n, by_at in shares.items()}
    others = [(row["at"], row["success"]) for row in evaluated]
    success = {"training": of("success"), "other splits": others}
    charts = [
        line_chart("success", {n: points for n, points in success.items() if points}, share=True),
        _agreement(reader, train, values),
        line_chart("how episodes end", endings, share=True),
        line_chart("turns, and the horizon", {"turns": of("turns"), "horizon": of("horizon")}),
        line_chart("tokens the policy sampled", {"tokens": of("sampled")}),
        line_chart("staleness: updates behind", {"oldest weights": of("staleness")}),
        line_chart(
            "left out, and refused by the environment",
            {"episodes not in the loss": of("excluded"), "actions not carried out": of("invalid")},
            share=True,
        ),
    ]
    return [chart for chart in charts if chart is not None]
