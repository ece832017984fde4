"""Figures of a comparison: success with its interval, success against a budget, and the learning
curves. Pure functions of the result of `results.table`, or of `versus`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.evaluation.intervals import FEWEST_SEEDS
from agentgym.evaluation.report import GRID, INK, MUTED, drawn, panels
from agentgym.pages import label

Table = Mapping[str, Any]  # the result of `results.table`
Figure = Any  # of Matplotlib, which takes a second to import
RowJson = Mapping[str, Any]
# cost of training: name in a table -> title of an axis
AXES = {
    "step": "optimizer step",
    "turns": "turns played",
    "tokens": "tokens",
    "sampled_tokens": "sampled tokens",
    "wall_s": "seconds",
    "cpu_s": "CPU-seconds",
    "accelerator_h": "accelerator hours",
}
# Okabe and Ito's palette, which color-blind readers can tell apart
COLOURS = ("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#1f2933")
_OTHERS = "other recipes"
_MARKERS = "os^DvPX"

Estimates = Sequence[Mapping[str, Any]]  # mean, low and high


def figures_of_rows(table: Table) -> dict[str, Figure | None]:
    """Return end of the file name -> figure of a table of recipes and horizons; None: no data.
    Only test rows are in the figure of success, unless there are none; `_curves` has all rows.
    """
    # validation rows exist to choose settings; do not compare them with test results
    rows = [row for row in table["rows"] if row["evaluation"]["split"] == "test"] or table["rows"]
    places = _places(rows)
    by_number = {
        label(key): [(y, row, key) for y, row in zip(places, rows, strict=True)]
        for key in rows[0]["success"]
    }
    names = [row["name"] for row in rows]
    interval = f"{100 * table['confidence']:g} % interval over {sources(table)}"
    caption = f"success · dot and line: mean and {interval}"
    figure = success_figure(by_number, names, places, caption)
    return {"": figure, "_curves": curves_figure(table)}


def sources(table: Table) -> str:
    """Return the text that names the source of the table's intervals: seeds and items, or items
    alone if a row or contrast has fewer than FEWEST_SEEDS seeds.
    """
    counts = [len(row["seeds"]) for row in table["rows"]]
    counts += [
        len(estimate["per_seed"])
        for contrast in table["contrasts"]
        for estimate in contrast["difference"].values()
    ]
    if min(counts) < FEWEST_SEEDS:
        return f"items, of fewer than {FEWEST_SEEDS} seeds not over seeds"
    return "seeds and items alike"


def success_figure(
    by_title: Mapping[str, Sequence[tuple[float, RowJson, str]]],
    names: Sequence[str],
    places: Sequence[float],
    caption: str,
    *,
    alike: bool = False,
) -> Figure:
    """Draw a panel per title: each row's success with its interval, its seeds and, if it has one,
    its start.
    by_title: title -> (height, row, name of the number). names, places: of all rows, their names
    and heights (0 is the top). caption: text below. alike: all panels have the same axis.
    """
    from matplotlib.ticker import PercentFormatter

    size = (10.0, 1.1 + 0.3 * (max(places) + 1))
    figure, ((*grid,),) = panels(size, 1, len(by_title), grid="x", sharey=True, sharex=alike)
    for axes, (title, marks) in zip(grid, by_title.items(), strict=True):
        for y, row, key in marks:
            result, seeds = row["success"][key], row["success"][key]["per_seed"]
            interval, bar = [result["low"], result["high"]], {"solid_capstyle": "butt"}
            if "start" in row:
                start, pen = row["start"][key]["mean"], {"markersize": 10, "markeredgewidth": 1.6}
                axes.plot([start, result["mean"]], [y] * 2, color=GRID, lw=5, zorder=1, **bar)
                axes.plot(start, y, "|", color=MUTED, zorder=2, **pen)
            axes.plot(seeds, [y + 0.24] * len(seeds), ".", color=MUTED, markersize=4, zorder=2)
            axes.plot(interval, [y] * 2, color=COLOURS[1], lw=1.8, zorder=3)
            axes.plot(result["mean"], y, "o", color=COLOURS[1], markersize=6, zorder=4)
        axes.set_title(drawn(title), fontsize=11, color=INK)
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        axes.margins(x=0.06)
        axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    for axes in grid:
        left, right = axes.get_xlim()
        axes.set_xlim(max(left, -0.03), min(right, 1.03))
    grid[0].set_yticks(places, list(map(drawn, names)))
    grid[0].set_ylim(max(places) + 0.7, -0.7)
    figure.tight_layout(w_pad=1.2)
    caption = f"{caption} · small dots: seeds · bar: from the start"
    figure.text(0.5, 0.0, caption, fontsize=9, color=MUTED, ha="center", va="top")
    return figure


def lines_figure(
    by_title: Mapping[str, Mapping[str, tuple[Sequence[float], Estimates]]],
    x_title: str,
    *,
    stepped: bool,
) -> Figure:
    """Draw a figure of success against x: a panel per title, in it a line and a band per name.
    by_title: title -> name -> (x, success); stepped: success holds up to the next x.
    """
    names = list(dict.fromkeys(name for curves in by_title.values() for name in curves))
    size = (max(7.0, 3.4 * len(by_title)), 3.4)
    figure, ((*grid,),) = panels(size, 1, len(by_title), sharey=True)
    draws, fills = ({"drawstyle": "steps-post"}, {"step": "post"}) if stepped else ({}, {})
    lines: dict[str, Any] = {}
    for axes, (title, curves) in zip(grid, by_title.items(), strict=True):
        for name, (x, success) in curves.items():
            colour = COLOURS[1:][names.index(name) % (len(COLOURS) - 1)]
            parts = ("mean", "low", "high")
            mean, low, high = ([100 * estimate[part] for estimate in success] for part in parts)
            (lines[name],) = axes.plot(x, mean, color=colour, **draws)
            axes.fill_between(x, low, high, color=colour, alpha=0.1, **fills)
            axes.locator_params(axis="x", integer=isinstance(x[-1], int))
        axes.set_title(drawn(title), fontsize=11, color=INK)
        axes.set_xlabel(x_title, fontsize=9)
    grid[0].set_ylim(0, 100)
    grid[0].set_ylabel("success, %", fontsize=9)
    figure.tight_layout(w_pad=0.8)
    at = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    texts = list(map(drawn, lines))
    figure.legend(list(lines.values()), texts, ncols=4, frameon=False, fontsize=9, **at)
    return figure


def curves_figure(table: Table) -> Figure | None:
    """Draw validation success against the cost of training: a line of panels per recipe or
    group, a panel per kind of cost. None if no row has a curve.
    """
    from matplotlib.ticker import PercentFormatter

    lines = _panel_lines([row for row in table["rows"] if "curves" in row and _curves(row)])
    if not lines:
        return None
    every_curve = [curve for rows in lines.values() for row in rows for curve in _curves(row)]
    shown = [axis for axis in AXES if any(curve.get(axis, [0])[-1] for curve in every_curve)]
    colours = _colour_table(lines)
    size = max(10.0, 2.5 * len(shown)), 0.5 + 1.9 * len(lines)
    figure, grid = panels(size, len(lines), len(shown), sharey=True)
    values = [value for curve in every_curve for value in curve["success"]]
    for (title, rows), line in zip(lines.items(), grid, strict=True):
        for number, (axis, axes) in enumerate(zip(shown, line, strict=True)):
            for row in rows:
                name = _series(row, rows)
                colour, marker = colours[name]
                x, low, mean, high = _mean_curve(row, axis)
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
                pen = {"linewidth": 1.7, "markersize": 3.2, "clip_on": False}
                axes.plot(x, mean, color=colour, marker=marker, label=drawn(name), **pen)
            axes.set_ylim(max(0.0, min(values) - 0.05), min(1.03, max(values) + 0.05))
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            axes.xaxis.set_major_formatter(_thousands)
            axes.margins(x=0)
            axes.set_xlim(left=0)
            axes.locator_params(axis="x", nbins=5)
            if rows is list(lines.values())[-1]:
                axes.set_xlabel(AXES[axis], fontsize=9)
            if number == 0:
                axes.set_ylabel("validation success", fontsize=9)
                horizons = {row["horizon"] for row in rows}
                if title == _OTHERS and len(horizons) == 1:
                    title = f"{title}, {horizons.pop()}" if len(rows) > 1 else rows[0]["name"]
                font = {"fontsize": 10.5, "color": INK, "fontweight": "bold"}
                axes.set_title(drawn(title), loc="left", **font)
            if number == len(shown) - 1 and len(rows) > 1:
                axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    figure.tight_layout(w_pad=0.8, h_pad=0.8)
    return figure


def _panel_lines(rows: Sequence[RowJson]) -> dict[str, list[RowJson]]:
    """Return title -> rows drawn together: those of one group, else those of one recipe, else the
    rest. A group of one row has the row's name. Groups are last.
    """
    lines: dict[str, list[RowJson]] = {}
    for row in rows:
        recipe, group = row["recipe"], row["group"]
        num_alike = sum((other["recipe"], other["group"]) == (recipe, group) for other in rows)
        title = group or (recipe if num_alike > 1 else _OTHERS)
        if group and num_alike == 1:
            title = row["name"]
        lines.setdefault(title, []).append(row)
    in_order = sorted(lines, key=lambda title: (bool(lines[title][0]["group"]), title == _OTHERS))
    return {title: lines[title] for title in in_order}


def _series(row: RowJson, together: Sequence[RowJson]) -> str:
    """Return a row's label in a panel: its horizon or recipe if only that varies, else its name."""
    for field, other in (("horizon", "recipe"), ("recipe", "horizon")):
        alike, apart = ({one[name] for one in together} for name in (other, field))
        if len(alike) == 1 and len(apart) == len(together) and all(apart):
            return str(row[field])
    return str(row["name"])


def _colour_table(lines: Mapping[str, Sequence[RowJson]]) -> dict[str, tuple[str, str]]:
    """Return label -> (color, marker), the same in all panels; distinct within one if possible."""
    table: dict[str, tuple[str, str]] = {}
    for rows in lines.values():
        names = [_series(row, rows) for row in rows]
        taken = [table[name] for name in names if name in table]
        free = [n for n in range(len(COLOURS)) if (COLOURS[n], _MARKERS[n]) not in taken]
        for name in names:
            if name not in table:
                number = free.pop(0) if free else len(table) % len(COLOURS)
                table[name] = (COLOURS[number], _MARKERS[number])
    return table


def _curves(row: RowJson) -> list[Mapping[str, Any]]:
    return [curve for curve in row["curves"] if curve["success"]]


def _mean_curve(row: RowJson, axis: str) -> tuple[Any, Any, Any, Any]:
    """Return (mean cost; minimum, mean, maximum success) over seeds, at steps validated by all."""
    curves = _curves(row)
    shared = sorted(set.intersection(*(set(curve["step"]) for curve in curves)))
    where = [[curve["step"].index(step) for step in shared] for curve in curves]
    x, y = (
        np.array([[curve[name][i] for i in at] for curve, at in zip(curves, where, strict=True)])
        for name in (axis, "success")
    )
    return x.mean(axis=0), y.min(axis=0), y.mean(axis=0), y.max(axis=0)


def _thousands(value: float, _: Any) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _places(rows: Sequence[RowJson]) -> list[float]:
    """Return each row's height, from 0 at the top, with a wider gap between recipes and groups."""
    blocks = [(row["group"], row["recipe"]) for row in rows]
    alone = [
        (group, "" if not group and blocks.count((group, recipe)) == 1 else recipe)
        for group, recipe in blocks
    ]
    places = [0.0]
    for block, before in zip(alone[1:], alone[:-1], strict=True):
        places.append(places[-1] + (1.0 if block == before else 1.6))
    return places
