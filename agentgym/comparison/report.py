"""Presentation of a comparison: the table in the published layout, a figure of the results and one
of the learning curves.

Pure functions of the result of `results.table`, and so also of a result file written earlier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.evaluation.report import GRID, INK, MUTED, label, png_of, style
from agentgym.evaluation.seeds import FEWEST_SEEDS

Table = Mapping[str, Any]  # the result of `results.table`
RowJson = Mapping[str, Any]

# Okabe and Ito: safe for colour-blind eyes
COLOURS = ("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#1f2933")
_OTHERS = "other recipes"
_MARKERS = "os^DvPX"
# distance from 1, or from 0 as a floor: if both rows of a contrast are nearer, little can show
# between them
CEILING = 0.06
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


def result_files(table: Table) -> dict[str, bytes]:
    """Return the files of a comparison, by file name: table as JSON and as text, and figures."""
    name = table["name"]
    files = {
        f"{name}.json": json.dumps(table, indent=1).encode() + b"\n",
        f"{name}.md": table_markdown(table).encode(),
    }
    if table["rows"]:
        files[f"{name}.png"] = results_png(table)
        curves = curves_png(table)
        if curves is not None:
            files[f"{name}_curves.png"] = curves
    return files


def table_markdown(table: Table) -> str:
    """Return success in percent, one row per recipe and horizon; then the contrasts, and how to
    read both.
    """
    rows = table["rows"]
    head = f"# {literal(table['title'] or table['name'])}"
    if not rows:
        return f"{head}\n\nNo cell is done.\n"
    parts = [head, _results(rows)]
    if table["contrasts"]:
        parts.append(_contrasts(table["contrasts"]))
    parts.append(_reading(table))
    if table["missing"]:
        parts.append(missing_line(table["missing"]))
    return "\n\n".join(parts) + "\n"


def missing_line(titles: Iterable[str]) -> str:
    """Return the line that names unfinished cells."""
    return f"Not in the table, because not done: {', '.join(map(literal, titles))}."


def literal(name: str) -> str:
    """Escape a name from a comparison's file: it adds no tag, link, image or further cell to the
    Markdown around it.
    """
    return " ".join(name.split()).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def results_png(table: Table) -> bytes:
    """Draw each row's success with its interval, its seeds as small dots, and its start; a panel
    per number.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    # validation rows exist to choose settings; do not compare them with test results
    rows = [row for row in table["rows"] if row["evaluation"]["split"] == "test"] or table["rows"]
    keys = list(rows[0]["success"])
    places = _places(rows)
    figure = Figure(figsize=(10.0, 1.1 + 0.3 * (max(places) + 1)), facecolor="white")
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=True):
        style(axes, grid="x")
        for y, row in zip(places, rows, strict=True):
            result = row["success"][key]
            if "start" in row:
                start = row["start"][key]["mean"]
                axes.plot(
                    [start, result["mean"]],
                    [y, y],
                    color=GRID,
                    linewidth=5,
                    solid_capstyle="butt",
                    zorder=1,
                )
                axes.plot(
                    start,
                    y,
                    marker="|",
                    markersize=10,
                    markeredgewidth=1.6,
                    color=MUTED,
                    zorder=2,
                )
            axes.plot(
                result["per_seed"],
                [y + 0.24] * len(result["per_seed"]),
                ".",
                color=MUTED,
                markersize=4,
                zorder=2,
            )
            axes.plot(
                [result["low"], result["high"]],
                [y, y],
                color=COLOURS[1],
                linewidth=1.8,
                zorder=3,
            )
            axes.plot(result["mean"], y, "o", color=COLOURS[1], markersize=6, zorder=4)
        axes.set_title(f"{label(key)}", fontsize=11, color=INK)
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        axes.margins(x=0.06)
        left, right = axes.get_xlim()
        axes.set_xlim(max(left, -0.03), min(right, 1.03))
    panels[0].set_yticks(places, [row["name"] for row in rows])
    panels[0].set_ylim(max(places) + 0.7, -0.7)
    for axes in panels:
        axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    interval = f"{100 * table['confidence']:g} % interval over {sources(table)}"
    caption = (
        f"success · dot and line: mean and {interval} · small dots: seeds · bar: from the start"
    )
    figure.tight_layout(w_pad=1.2)
    figure.text(0.5, 0.0, caption, fontsize=9, color=MUTED, ha="center", va="top")
    return png_of(figure)


def curves_png(table: Table) -> bytes | None:
    """Draw validation success against its cost: a line of panels per recipe, a panel per cost.
    None if nothing was validated.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    lines = _panel_lines(
        [row for row in table["rows"] if any(curve["success"] for curve in row.get("curves", ()))]
    )
    if not lines:
        return None
    every_curve = [curve for rows in lines.values() for row in rows for curve in _curves(row)]
    shown = [axis for axis in AXES if any(curve.get(axis, [0])[-1] for curve in every_curve)]
    colours = _colour_table(lines)
    size = max(10.0, 2.5 * len(shown)), 0.5 + 1.9 * len(lines)
    figure = Figure(figsize=size, facecolor="white")
    grid = figure.subplots(len(lines), len(shown), squeeze=False, sharey=True)
    values = [value for curve in every_curve for value in curve["success"]]
    for (title, rows), panels in zip(lines.items(), grid, strict=True):
        for number, (axis, axes) in enumerate(zip(shown, panels, strict=True)):
            style(axes)
            ends = []
            for row in rows:
                colour, marker = colours[_series(row, rows)]
                x, low, mean, high = _mean_curve(row, axis)
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
                axes.plot(
                    x,
                    mean,
                    color=colour,
                    linewidth=1.7,
                    marker=marker,
                    markersize=3.2,
                    clip_on=False,
                )
                ends.append((mean[-1], _series(row, rows), (colour, marker)))
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
                axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
            if number == len(shown) - 1 and len(rows) > 1:
                _label_ends(axes, ends)
    figure.tight_layout(w_pad=0.8, h_pad=0.8)
    return png_of(figure)


def _results(rows: Sequence[RowJson]) -> str:
    keys = list(rows[0]["success"])
    average = next(key for key in keys if key.startswith("avg"))
    head = [
        "recipe",
        "horizon",
        *map(label, keys),
        f"gain {label(average)}",
        "gain greedy",
        "validation: last (best)",
        "CPU-s",
    ]
    lines: list[list[str]] = []
    shown_start = None
    for row in rows:
        start = row.get("start")
        if start is not None and start != shown_start:
            lines.append(["*start*", "", *(spread_of(start[key]) for key in keys), "", "", "", ""])
            shown_start = start
        lines.append(
            [
                *_titles(row),
                *(spread_of(row["success"][key]) for key in keys),
                *_gains(row, average),
            ]
        )
    return markdown(head, lines, right=2)


def _titles(row: RowJson) -> tuple[str, str]:
    """Return the two first columns: recipe and horizon, if the row is only these; else its name."""
    plain = row["name"] == " ".join(filter(None, (row["recipe"], row["horizon"])))
    return literal(row["recipe"] if plain else row["name"]), literal(row["horizon"])


def _gains(row: RowJson, average: str) -> list[str]:
    if "gain" not in row:
        return ["", "", "", ""]
    best, last = (
        _mean([value for value in row["validation"][which] if value is not None])
        for which in ("best", "last")
    )
    validated = "" if best is None or last is None else f"{100 * last:.1f} ({100 * best:.1f})"
    cpu = _mean(row["cost"]["cpu_s"])
    return [
        points_of(row["gain"][average]),
        points_of(row["gain"]["greedy"]),
        validated,
        f"{cpu:.0f}" if cpu else "",
    ]


def _contrasts(contrasts: Sequence[Mapping[str, Any]]) -> str:
    keys = list(contrasts[0]["difference"])
    average = next(key for key in keys if key.startswith("avg"))
    head = ["contrast", *map(label, keys), f"{label(average)} by seed", "at"]
    lines = []
    for contrast in contrasts:
        difference = contrast["difference"]
        seeds = ", ".join(_signed(value) for value in difference[average]["per_seed"])
        lines.append(
            [
                literal(f"{contrast['a']} − {contrast['b']}"),
                *(points_of(difference[key]) for key in keys),
                seeds,
                _limit(contrast, average),
            ]
        )
    return "Paired differences, in points:\n\n" + markdown(head, lines, right=1)


def _limit(contrast: Mapping[str, Any], average: str) -> str:
    """Return `ceiling` or `floor` if both rows are too near it for a difference to show, with
    ` (greedy)` if only their greedy success is; else nothing.
    """
    limits = contrast.get("limit", {})
    if limits.get(average):
        return str(limits[average])
    return f"{limits['greedy']} (greedy)" if limits.get("greedy") else ""


def _reading(table: Table) -> str:
    row = table["rows"][0]
    settings = row["evaluation"]
    seeds = sorted({seed for row in table["rows"] for seed in row["seeds"]})
    return (
        "Success in percent, mean ± sample standard deviation over seeds"
        f" {', '.join(map(str, seeds))}; {settings['num_items']} {settings['split']} items per"
        f" seed, {settings['max_turns']} turns, one greedy episode and {settings['num_samples']}"
        f" samples at temperature {settings['temperature']:g} per item, unless a row says"
        " otherwise. Gains are over the row's own start, in points. Brackets:"
        f" {100 * table['confidence']:g} % intervals over {sources(table)}, paired item by"
        " item and seed by seed (coverage.json says how often they hold). A contrast is at a"
        f" ceiling where both rows are within {100 * CEILING:g} points of 100: there little can"
        " show. Validation success (one sample per item) is of other items than the test. CPU-s:"
        " of the training process, mean over seeds, without environment servers, validation and"
        " evaluation."
    )


def sources(table: Table) -> str:
    """Return the text that names the source of the table's intervals: items, or seeds and items."""
    counts = [len(row["seeds"]) for row in table["rows"]]
    counts += [
        len(estimate["per_seed"])
        for contrast in table["contrasts"]
        for estimate in contrast["difference"].values()
    ]
    if min(counts) < FEWEST_SEEDS:
        return f"items, of fewer than {FEWEST_SEEDS} seeds not over seeds"
    return "seeds and items alike"


def spread_of(estimate: Mapping[str, Any]) -> str:
    deviation = "" if estimate["sd"] is None else f" ± {100 * estimate['sd']:.1f}"
    return f"{100 * estimate['mean']:.1f}{deviation}"


def points_of(estimate: Mapping[str, Any]) -> str:
    return f"{_signed(estimate['mean'])} [{_signed(estimate['low'])}, {_signed(estimate['high'])}]"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], *, right: int) -> str:
    """Return a Markdown table, padded so that it also reads as plain text. right: the first
    right-aligned column.
    """
    rows = [head, *lines]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(head))]
    rule = [
        "-" * width if column < right else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]

    def padded(row: Sequence[str]) -> list[str]:
        left = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)][:right]
        return left + [cell.rjust(width) for cell, width in zip(row, widths, strict=True)][right:]

    lines = [padded(rows[0]), rule, *map(padded, rows[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _places(rows: Sequence[RowJson]) -> list[float]:
    """Return each row's position, from the top, with a gap around the rows of one recipe and
    between groups.
    """
    blocks = [(row["group"], row["recipe"]) for row in rows]
    alone = [
        (group, "" if not group and blocks.count((group, recipe)) == 1 else recipe)
        for group, recipe in blocks
    ]
    places = [0.0]
    for block, before in zip(alone[1:], alone[:-1], strict=True):
        places.append(places[-1] + (1.0 if block == before else 1.6))
    return places


def _panel_lines(rows: Sequence[RowJson]) -> dict[str, list[RowJson]]:
    """Return title -> rows drawn together: the horizons of one recipe, the rows of one group, and
    the recipes with one horizon.
    """
    lines: dict[str, list[RowJson]] = {}
    for row in rows:
        alike = [
            other
            for other in rows
            if (other["recipe"], other["group"]) == (row["recipe"], row["group"])
        ]
        title = (
            row["name"]
            if row["group"] and len(alike) == 1
            else row["group"] or (row["recipe"] if len(alike) > 1 else _OTHERS)
        )
        lines.setdefault(title, []).append(row)
    return dict(
        sorted(lines.items(), key=lambda item: (bool(item[1][0]["group"]), item[0] == _OTHERS))
    )


def _series(row: RowJson, together: Sequence[RowJson]) -> str:
    """Return a row's label among the rows drawn together: horizon, recipe, or its name."""
    for field, other in (("horizon", "recipe"), ("recipe", "horizon")):
        alike, apart = (
            {other_row[other] for other_row in together},
            {other_row[field] for other_row in together},
        )
        if len(alike) == 1 and len(apart) == len(together) and all(apart):
            return str(row[field])
    return str(row["name"])


def _colour_table(lines: Mapping[str, Sequence[RowJson]]) -> dict[str, tuple[str, str]]:
    """Return one colour and marker per horizon, the same in every panel; other names get the free
    ones.
    """
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
    """Return (mean cost, minimum, mean, maximum of success) over seeds, at shared checkpoints."""
    curves = _curves(row)
    shared = sorted(set.intersection(*(set(curve["step"]) for curve in curves)))
    where = [[curve["step"].index(step) for step in shared] for curve in curves]
    x, y = (
        np.array([[curve[name][i] for i in at] for curve, at in zip(curves, where, strict=True)])
        for name in (axis, "success")
    )
    return x.mean(axis=0), y.min(axis=0), y.mean(axis=0), y.max(axis=0)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, tuple[str, str]]]) -> None:
    """Write names and markers at the right ends of the lines, at least 10 points apart."""
    gap = (
        10.0
        / (axes.bbox.height * 72.0 / axes.figure.dpi)
        * (axes.get_ylim()[1] - axes.get_ylim()[0])
    )
    ordered = sorted(ends, key=lambda end: end[0])
    heights = [end[0] for end in ordered]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    over = max(0.0, heights[-1] - axes.get_ylim()[1])
    right = axes.get_xlim()[1]
    for (_, name, (colour, marker)), height in zip(ordered, heights, strict=True):
        axes.plot(right, height - over, marker, color=colour, markersize=5, clip_on=False)
        offset = {"xytext": (7, 0), "textcoords": "offset points"}
        axes.annotate(
            name,
            (right, height - over),
            **offset,
            va="center",
            fontsize=9,
            color=INK,
            annotation_clip=False,
        )


def _thousands(value: float, _: Any) -> str:
    text = (
        f"{value / 1e6:g}M"
        if abs(value) >= 1e6
        else f"{value / 1e3:g}k"
        if abs(value) >= 1e3
        else f"{value:g}"
    )
    return re.sub(r"(\.\d)\d+", r"\1", text)
