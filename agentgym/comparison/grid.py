"""Presentation of a comparison whose columns are environments: the published tables, algorithm by
environment and method by environment, and their figures.

Pure functions of the result of `results.table`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.comparison.report import (
    AXES,
    COLOURS,
    RowJson,
    Table,
    curves_png,
    literal,
    markdown,
    missing_line,
    points_of,
    spread_of,
)
from agentgym.evaluation.report import INK, MUTED, label, png_of, style
from agentgym.evaluation.seeds import FEWEST_SEEDS

Cells = Mapping[str, Mapping[str, RowJson]]  # method -> environment -> row


def grid_files(table: Table) -> dict[str, bytes]:
    """Return the tables as JSON and Markdown and the figures, by file name."""
    name = table["name"]
    files = {
        f"{name}.json": json.dumps(table, indent=1).encode() + b"\n",
        f"{name}.md": grid_markdown(table).encode(),
    }
    if table["rows"]:
        figures = {
            "": success_png(table),
            "_turns": lines_png(table, "turns", "turns an episode may have"),
            "_pass": lines_png(table, "pass_at", "k, of pass@k"),
            "_curves": curves_png({**table, "rows": training_rows(table["rows"])}),
        }
        files |= {f"{name}{end}.png": png for end, png in figures.items() if png is not None}
    return files


def grid_markdown(table: Table) -> str:
    """Return Markdown tables: one per number, gains, contrasts and costs; and how to read them."""
    head, rows = f"# {literal(table['title'] or table['name'])}", table["rows"]
    if not rows:
        return f"{head}\n\nNo cell is done.\n"
    parts = [head]
    for key in shared_keys(rows):
        parts.append(
            f"{label(key)}, percent:\n\n{_table(table, _success(key), _starts(rows, key))}"
        )
    main = main_key(rows)
    if any("gain" in row for row in rows):
        gains = _table(table, lambda row: points_of(row["gain"][main]) if "gain" in row else "")
        parts.append(f"Gain of {label(main)} over the cell's own start, points:\n\n{gains}")
    if table["contrasts"]:
        parts.append(_contrasts(table, main))
    if any("cost" in row for row in rows):
        costs = _table(table, lambda row: _cost(row["cost"]) if "cost" in row else "")
        parts.append(f"What training cost, mean over seeds:\n\n{costs}")
    parts.append(_reading(table))
    if table["missing"]:
        parts.append(missing_line(table["missing"]))
    return "\n\n".join(parts) + "\n"


def cells_of_table(table: Table) -> Cells:
    """Return the rows by method and environment; methods in order of first appearance."""
    cells: dict[str, dict[str, RowJson]] = {}
    for row in table["rows"]:
        cells.setdefault(row["method"], {})[row["environment"]] = row
    return cells


def shared_keys(rows: Sequence[RowJson]) -> list[str]:
    """Return the names of the numbers that every cell has, in the first cell's order; if none is
    shared, all of the first cell's.
    """
    keys = [key for key in rows[0]["success"] if all(key in row["success"] for row in rows)]
    return keys or list(rows[0]["success"])


def main_key(rows: Sequence[RowJson]) -> str:
    """Return the name of the mean over samples, `avg_at_<n>`."""
    return next(key for key in shared_keys(rows) if key.startswith("avg"))


def training_rows(rows: Sequence[RowJson]) -> list[RowJson]:
    """Return the rows for `curves_png`: panels per environment, a line in them per method."""
    envs = [row["environment"] for row in rows]
    alone = {env for env in envs if envs.count(env) == 1}  # the title is the row's name
    return [
        {
            **row,
            "group": row["environment"],
            "recipe": "",
            "horizon": "",
            "name": row["name"] if row["environment"] in alone else row["method"],
        }
        for row in rows
    ]


def success_png(table: Table) -> bytes:
    """Draw a panel per environment: each method's success with its interval, seeds as small dots,
    and the start of training.
    """
    from matplotlib.figure import Figure

    cells, key = cells_of_table(table), main_key(table["rows"])
    figure = Figure(figsize=(10.0, 1.3 + 0.36 * len(cells)), facecolor="white")
    panels = figure.subplots(1, len(table["environments"]), sharey=True, squeeze=False)[0]
    for axes, env in zip(panels, table["environments"], strict=True):
        style(axes, grid="x")
        for y, row in enumerate(by_env.get(env) for by_env in cells.values()):
            if row is not None:
                _mark(axes, y, row, key)
        axes.set_title(_drawn(env), fontsize=11, color=INK)
        axes.set_xlim(-3, 103)
    panels[0].set_yticks(range(len(cells)), [_drawn(name) for name in cells])
    panels[0].set_ylim(len(cells) - 0.4, -0.6)
    figure.supxlabel(
        f"{label(key)}, % · line: {100 * table['confidence']:g} % interval · grey mark: the start",
        fontsize=9,
        color=MUTED,
    )
    figure.tight_layout(w_pad=1.2)
    return png_of(figure)


def _mark(axes: Any, y: int, row: RowJson, key: str) -> None:
    estimate, seeds = row["success"][key], row["success"][key]["per_seed"]
    if "start" in row:
        start = 100 * row["start"][key]["mean"]
        axes.plot(start, y, "|", color=MUTED, markersize=11, markeredgewidth=1.6)
    axes.plot([100 * estimate["low"], 100 * estimate["high"]], [y] * 2, color=COLOURS[1])
    axes.plot([100 * value for value in seeds], [y + 0.24] * len(seeds), ".", color=MUTED)
    axes.plot(100 * estimate["mean"], y, "o", color=COLOURS[1], markersize=6)


def lines_png(table: Table, what: str, title: str) -> bytes | None:
    """Draw a panel per environment, a line per method, its interval as a band: success against
    turns, or pass@k. None if no cell has more than one value.
    """
    from matplotlib.figure import Figure

    cells, envs = cells_of_table(table), table["environments"]
    curves = {
        (method, env): curve
        for method, by_env in cells.items()
        for env, row in by_env.items()
        if len((curve := _curve(row, what))[0]) > 1
    }
    if not curves:
        return None
    figure = Figure(figsize=(max(7.0, 3.4 * len(envs)), 3.4), facecolor="white")
    panels = figure.subplots(1, len(envs), sharey=True, squeeze=False)[0]
    for axes, env in zip(panels, envs, strict=True):
        style(axes)
        for number, method in enumerate(cells):
            if (method, env) in curves:
                _line(axes, *curves[method, env], COLOURS[1:][number % 6], method, what == "turns")
        axes.set_title(_drawn(env), fontsize=11, color=INK)
        axes.set_xlabel(title, fontsize=9)
        axes.locator_params(axis="x", integer=True)
    panels[0].set_ylim(0, 100)
    panels[0].set_ylabel("success, %", fontsize=9)
    handles = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
    figure.tight_layout(w_pad=0.8)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    return png_of(figure)


def _line(
    axes: Any,
    budgets: Sequence[float],
    success: Sequence[Mapping[str, float]],
    colour: str,
    method: str,
    stepped: bool,
) -> None:
    mean, low, high = (
        [100 * estimate[part] for estimate in success] for part in ("mean", "low", "high")
    )
    draws, fills = {"drawstyle": "steps-post"}, {"step": "post"}
    axes.plot(budgets, mean, color=colour, label=_drawn(method), **(draws if stepped else {}))
    axes.fill_between(budgets, low, high, color=colour, alpha=0.1, **(fills if stepped else {}))


def _curve(row: RowJson, what: str) -> tuple[list[float], list[Mapping[str, float]]]:
    if what == "turns":
        curve = row["turns"] or {"budgets": [], "success": []}
        return curve["budgets"], curve["success"]
    success = row.get(what, [])
    return list(range(1, len(success) + 1)), success


def _table(
    table: Table, text_of: Callable[[RowJson], str], first: Mapping[str, str] | None = None
) -> str:
    """Return a Markdown table, methods by environments. first: texts of a first line, if any."""
    envs = table["environments"]
    lines = [["*start*", "", *(first.get(env, "") for env in envs)]] if first else []
    for method, by_env in cells_of_table(table).items():
        row = next(iter(by_env.values()))
        plain = method == " ".join(filter(None, (row["recipe"], row["horizon"])))
        names = [literal(row["recipe"] if plain else method), literal(row["horizon"])]
        lines.append([*names, *(text_of(by_env[env]) if env in by_env else "" for env in envs)])
    return markdown(["recipe", "horizon", *map(literal, envs)], lines, right=2)


def _success(key: str) -> Callable[[RowJson], str]:
    return lambda row: _with_interval(row["success"][key])


def _with_interval(estimate: Mapping[str, Any]) -> str:
    low, high = 100 * estimate["low"], 100 * estimate["high"]
    return f"{spread_of(estimate)} [{low:.1f}, {high:.1f}]"


def _starts(rows: Sequence[RowJson], key: str) -> dict[str, str] | None:
    """Return the start by environment; None if the cells of some column started differently."""
    starts: dict[str, set[str]] = {}
    for row in rows:
        if "start" in row:
            starts.setdefault(row["environment"], set()).add(_with_interval(row["start"][key]))
    alike = starts and all(len(values) == 1 for values in starts.values())
    return {env: next(iter(values)) for env, values in starts.items()} if alike else None


def _contrasts(table: Table, main: str) -> str:
    """Return a Markdown table of the contrasts of methods, with a column per environment."""
    by_contrast: dict[str, dict[str, str]] = {}
    for contrast in table["contrasts"]:
        name = " − ".join(map(literal, contrast["of"]))
        shown = " *" if contrast["shown"][main] else ""
        limit = f" ({contrast['limit'][main]})" if contrast["limit"][main] else ""
        text = f"{points_of(contrast['difference'][main])}{shown}{limit}"
        by_contrast.setdefault(name, {})[contrast["environment"]] = text
    envs = table["environments"]
    lines = [[name, *(by_env.get(env, "") for env in envs)] for name, by_env in by_contrast.items()]
    return (
        f"Paired differences of {label(main)}, points; *: also with an interval that is right for"
        " all columns together (Bonferroni):\n\n"
        + markdown(["contrast", *map(literal, envs)], lines, right=1)
    )


def _cost(cost: Mapping[str, Sequence[float]]) -> str:
    units = {"sampled_tokens": "tokens sampled", "cpu_s": "CPU-s", "accelerator_h": "h"}
    parts = []
    for axis in AXES:
        values = cost.get(axis, ())
        if axis in units and values and any(values):
            mean = sum(values) / len(values)
            parts.append(
                f"{mean:,.0f} {units[axis]}" if mean >= 100 else f"{mean:.3g} {units[axis]}"
            )
    return ", ".join(parts)


def _reading(table: Table) -> str:
    rows = table["rows"]
    settings = {}
    for row in rows:
        evaluation = row["evaluation"]
        settings[row["environment"]] = (
            f"{literal(row['environment'])}: {evaluation['num_items']} {evaluation['split']} items"
            f" x {evaluation['num_samples']} samples at temperature {evaluation['temperature']:g},"
            f" {evaluation['max_turns']} turns"
        )
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    several = min(len(row["seeds"]) for row in rows) >= FEWEST_SEEDS
    whys = {
        f"No success against turns in {literal(row['environment'])}: {literal(why)}."
        for row in rows
        if (why := row["no_turns_curve"])
    }
    return " ".join(
        [
            f"Seeds {', '.join(map(str, seeds))}. {'; '.join(settings.values())}. Each cell is a"
            " training and two evaluations as `agentgym evaluate` makes them, of the checkpoint it"
            " began with and of its last one. Brackets:"
            f" {100 * table['confidence']:g} % intervals over"
            + (" seeds and items alike," if several else " items, or their families where told,")
            + " paired item by item where they are of a difference.",
            *sorted(whys),
        ]
    )


def _drawn(text: str) -> str:
    """Return the text with dollar signs escaped: matplotlib would read formulas between them."""
    return text.replace("$", "\\$")
