"""Files of a comparison: its tables in the published layout, and its figures.

In a table of recipes and horizons the columns are numbers, for example pass@4; in a grid they are
environments. All are pure functions of the result of `results.table`, also one read from a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.comparison.figures import (
    Figure,
    RowJson,
    Table,
    curves_figure,
    figures_of_rows,
    lines_figure,
    sources,
    success_figure,
)
from agentgym.comparison.paper import numbers, table_csv, table_latex
from agentgym.evaluation.intervals import FEWEST_SEEDS
from agentgym.evaluation.report import png_of, svg_of
from agentgym.pages import gain, label, points, spread
from agentgym.tracking.markdown import literal, markdown

# distance from 1 (ceiling) or 0 (floor): if both rows of a contrast are nearer, their difference
# can only be small
CEILING = 0.06


def text_of_rows(table: Table) -> list[str]:
    """Return parts of Markdown: success by recipe and horizon, contrasts, and how to read both."""
    contrasts = [_contrasts(table["contrasts"])] if table["contrasts"] else []
    return [_results(table["rows"]), *contrasts, _reading(table)]


def _results(rows: Sequence[RowJson]) -> str:
    keys = list(rows[0]["success"])
    average = next(key for key in keys if key.startswith("avg"))
    head = ["recipe", "horizon", *map(label, keys), f"gain {label(average)}"]
    head += ["gain greedy", "validation: last (best)", "CPU-s"]
    lines: list[list[str]] = []
    shown_start = None
    for row in rows:
        start = row.get("start")
        if start is not None and start != shown_start:
            lines.append(["*start*", "", *(spread(start[key]) for key in keys), "", "", "", ""])
            shown_start = start
        spreads = [spread(row["success"][key]) for key in keys]
        lines.append([*titles_of(row, row["name"]), *spreads, *_gains(row, average)])
    return markdown(head, lines, right=2)


def titles_of(row: RowJson, name: str) -> tuple[str, str]:
    """Return the first two cells of a table row, escaped: the recipe and the horizon. `name`
    replaces the recipe, unless it only joins the row's recipe and horizon.
    """
    plain = name == " ".join(filter(None, (row["recipe"], row["horizon"])))
    return literal(row["recipe"] if plain else name), literal(row["horizon"])


def _gains(row: RowJson, average: str) -> list[str]:
    if "gain" not in row:
        return ["", "", "", ""]
    best, last = (
        _mean([value for value in row["validation"][which] if value is not None])
        for which in ("best", "last")
    )
    validated = "" if best is None or last is None else f"{100 * last:.1f} ({100 * best:.1f})"
    cpu = _mean(row["cost"]["cpu_s"])
    gains = [gain(row["gain"][key]) for key in (average, "greedy")]
    return [*gains, validated, f"{cpu:.0f}" if cpu else ""]


def _contrasts(contrasts: Sequence[Mapping[str, Any]]) -> str:
    keys = list(contrasts[0]["difference"])
    average = next(key for key in keys if key.startswith("avg"))
    head = ["contrast", *map(label, keys), f"{label(average)} by seed", "at"]
    lines = []
    for contrast in contrasts:
        difference = contrast["difference"]
        seeds = ", ".join(points(value) for value in difference[average]["per_seed"])
        name = literal(f"{contrast['a']} − {contrast['b']}")
        gains = [gain(difference[key]) for key in keys]
        lines.append([name, *gains, seeds, _limit(contrast, average)])
    return "Paired differences, in points:\n\n" + markdown(head, lines, right=1)


def _limit(contrast: Mapping[str, Any], average: str) -> str:
    """Return `ceiling` or `floor` if the number `average` is at this limit, followed by ` (greedy)`
    if only the greedy success is; "" if neither is.
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
        f" samples at temperature {settings['temperature']:g} per item, unless a row states"
        " otherwise. Gains are over the row's own start, in points. Brackets:"
        f" {100 * table['confidence']:g} % intervals over {sources(table)}, paired item by"
        " item and seed by seed (coverage.json has how often they hold). A contrast is at a"
        f" ceiling where both rows are within {100 * CEILING:g} points of 100: there little can"
        " show. Validation success (one sample per item) is of other items than the test. CPU-s:"
        " of the training process, mean over seeds, without environment servers, validation and"
        " evaluation."
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


Cells = Mapping[str, Mapping[str, RowJson]]  # method -> environment -> row


def figures_of_grid(table: Table) -> dict[str, Figure | None]:
    """Return end of the file name -> figure of a table of environments; None: no data."""
    cells, key, envs = cells_of_table(table), main_key(table["rows"]), table["environments"]
    rows = list(enumerate(cells.values()))
    by_env = {env: [(y, row[env], key) for y, row in rows if env in row] for env in envs}
    caption = f"{label(key)} · line: {100 * table['confidence']:g} % interval"
    return {
        "": success_figure(by_env, list(cells), range(len(cells)), caption, alike=True),
        "_turns": _lines(cells, envs, "turns", "turns an episode may have"),
        "_pass": _lines(cells, envs, "pass_at", "k, of pass@k"),
        "_curves": curves_figure({**table, "rows": training_rows(table["rows"])}),
    }


def text_of_grid(table: Table) -> list[str]:
    """Return parts of Markdown: a table per number, gains, contrasts, costs; how to read them."""
    rows, parts = table["rows"], []
    for key in shared_keys(rows):
        success = _table(table, _success(key), _starts(rows, key))
        parts.append(f"{label(key)}, percent:\n\n{success}")
    main = main_key(rows)
    if any("gain" in row for row in rows):
        gains = _table(table, lambda row: gain(row["gain"][main]) if "gain" in row else "")
        parts.append(f"Gain of {label(main)} over the cell's own start, points:\n\n{gains}")
    if table["contrasts"]:
        parts.append(_grid_contrasts(table, main))
    if any("cost" in row for row in rows):
        costs = _table(table, lambda row: _cost(row["cost"]) if "cost" in row else "")
        parts.append(f"What training cost, mean over seeds:\n\n{costs}")
    return [*parts, _grid_reading(table)]


def cells_of_table(table: Table) -> Cells:
    """Return method -> environment -> row; methods in order of first appearance."""
    cells: dict[str, dict[str, RowJson]] = {}
    for row in table["rows"]:
        cells.setdefault(row["method"], {})[row["environment"]] = row
    return cells


def shared_keys(rows: Sequence[RowJson]) -> list[str]:
    """Return the names of the numbers that every cell has; if none is shared, the first cell's."""
    keys = [key for key in rows[0]["success"] if all(key in row["success"] for row in rows)]
    return keys or list(rows[0]["success"])


def main_key(rows: Sequence[RowJson]) -> str:
    """Return the name of the mean over samples, `avg_at_<n>`."""
    return next(key for key in shared_keys(rows) if key.startswith("avg"))


def training_rows(rows: Sequence[RowJson]) -> list[RowJson]:
    """Return copies of the rows for `curves_figure`: grouped by environment, named by method."""
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


def _lines(cells: Cells, envs: Sequence[str], what: str, title: str) -> Figure | None:
    """Draw success by turns (`what` is "turns") or pass@k ("pass_at"), a panel per
    environment; None if no cell has two values. title: of the x axis.
    """
    curves = {e: {m: _curve(row[e], what) for m, row in cells.items() if e in row} for e in envs}
    by_env = {e: {m: c for m, c in of_env.items() if len(c[0]) > 1} for e, of_env in curves.items()}
    return lines_figure(by_env, title, stepped=what == "turns") if any(by_env.values()) else None


def _curve(row: RowJson, what: str) -> tuple[list[float], list[Mapping[str, float]]]:
    if what == "turns":
        curve = row["turns"] or {"budgets": [], "success": []}
        return curve["budgets"], curve["success"]
    success = row.get(what, [])
    return list(range(1, len(success) + 1)), success


def _table(
    table: Table, text_of: Callable[[RowJson], str], first: Mapping[str, str] | None = None
) -> str:
    """Return a Markdown table with a line per method and a column per environment.
    text_of: gives the text of a cell; first: environment -> text of a first line, *start*.
    """
    envs = table["environments"]
    lines = [["*start*", "", *(first.get(env, "") for env in envs)]] if first else []
    for method, by_env in cells_of_table(table).items():
        row = next(iter(by_env.values()))
        names = titles_of(row, method)
        lines.append([*names, *(text_of(by_env[env]) if env in by_env else "" for env in envs)])
    return markdown(["recipe", "horizon", *map(literal, envs)], lines, right=2)


def _success(key: str) -> Callable[[RowJson], str]:
    return lambda row: _with_interval(row["success"][key])


def _with_interval(estimate: Mapping[str, Any]) -> str:
    low, high = 100 * estimate["low"], 100 * estimate["high"]
    return f"{spread(estimate)} [{low:.1f}, {high:.1f}]"


def _starts(rows: Sequence[RowJson], key: str) -> dict[str, str] | None:
    """Return environment -> success at the start, as text; None if no row has a start, or rows of
    one environment have different ones. key: name of the number.
    """
    starts: dict[str, set[str]] = {}
    for row in rows:
        if "start" in row:
            starts.setdefault(row["environment"], set()).add(_with_interval(row["start"][key]))
    alike = starts and all(len(values) == 1 for values in starts.values())
    return {env: next(iter(values)) for env, values in starts.items()} if alike else None


def _grid_contrasts(table: Table, main: str) -> str:
    """Return caption and Markdown table of the methods' contrasts of `main`, by environment."""
    by_contrast: dict[str, dict[str, str]] = {}
    for contrast in table["contrasts"]:
        name = " − ".join(map(literal, contrast["of"]))
        shown = " *" if contrast["shown"][main] else ""
        limit = f" ({contrast['limit'][main]})" if contrast["limit"][main] else ""
        text = f"{gain(contrast['difference'][main])}{shown}{limit}"
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
    means = {axis: _mean(cost.get(axis, ())) for axis in units}
    return ", ".join(
        f"{mean:{',.0f' if mean >= 100 else '.3g'}} {units[axis]}"
        for axis, mean in means.items()
        if mean
    )


def _grid_reading(table: Table) -> str:
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
            + (" seeds and items alike," if several else " items, or their families if known,")
            + " paired item by item for a difference.",
            *sorted(whys),
        ]
    )


def result_files(table: Table) -> dict[str, bytes]:
    """Return the files of a comparison by name: its table as JSON, Markdown, CSV and LaTeX, and its
    figures as PNG and SVG.
    """
    name = table["name"]
    drawn = figures_of_grid if table.get("environments") else figures_of_rows
    figures = drawn(table) if table["rows"] else {}
    return {
        f"{name}.json": json.dumps(table, indent=1).encode() + b"\n",
        f"{name}.md": table_markdown(table).encode(),
        f"{name}.csv": table_csv(table),
        f"{name}.tex": table_latex(table),
        **{
            f"{name}{end}.{form}": written(figure)
            for end, figure in figures.items()
            if figure is not None
            for form, written in (("png", png_of), ("svg", svg_of))
        },
    }


def table_markdown(table: Table) -> str:
    """Return the tables and how to read them, as Markdown; a note if no cell is finished."""
    parts = [f"# {literal(table['title'] or table['name'])}"]
    if not table["rows"]:
        return f"{parts[0]}\n\nNo cell is done.\n"
    parts += (text_of_grid if table.get("environments") else text_of_rows)(table)
    if table["missing"]:
        names = ", ".join(map(literal, table["missing"]))
        parts.append(f"Not in the table, because not done: {names}.")
    return "\n\n".join(parts) + "\n"


def logged_tables(table: Table) -> dict[str, bytes]:
    """Return tables for MLflow (pandas' JSON, orient split) by file name: rows, contrasts; an empty
    one is left out.
    """
    import pandas as pd

    rows = [
        {
            "row": row["name"],
            "environment": row.get("environment", ""),
            "seeds": len(row["seeds"]),
            **_numbers("", row["success"]),
            **_numbers("gain ", row.get("gain", {})),
        }
        for row in table["rows"]
    ]
    contrasts = [
        {
            "contrast": f"{contrast['a']} - {contrast['b']}",
            "environment": contrast.get("environment", ""),
            **_numbers("", contrast["difference"]),
        }
        for contrast in table["contrasts"]
    ]
    tables = {"rows_table.json": rows, "contrasts_table.json": contrasts}
    return {
        name: pd.DataFrame(lines).to_json(orient="split", index=False).encode()
        for name, lines in tables.items()
        if lines
    }


def logged_metrics(table: Table) -> dict[str, float]:
    """Return success and gain of each row and the difference of each contrast, averaged over
    samples, with the bounds of their intervals, as metrics `success/ROW`, `success_low/ROW` etc.
    """
    metrics = {}
    for kind, name, _, estimates in numbers(table):
        if kind == "start" or not estimates:
            continue
        shown = re.sub(r"[^A-Za-z0-9_. :/-]", "_", name)  # MLflow takes no other characters
        average = next(estimate for key, estimate in estimates.items() if key.startswith("avg"))
        for part, end in (("mean", ""), ("low", "_low"), ("high", "_high")):
            metrics[f"{kind}{end}/{shown}"[:250]] = round(average[part], 4)
    return metrics


def _numbers(prefix: str, estimates: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{prefix}{key}{end}": round(estimate[part], 4)
        for key, estimate in estimates.items()
        for part, end in (("mean", ""), ("low", " low"), ("high", " high"))
    }
