"""Text of a comparison: its table in the published layout, in Markdown.

Pure functions of the result of `results.table`, and so also of a result file written earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentgym.evaluation.intervals import FEWEST_SEEDS
from agentgym.pages import gain, label, points

Table = Mapping[str, Any]  # the result of `results.table`
RowJson = Mapping[str, Any]

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


def literal(name: str) -> str:
    """Escape a name from a comparison's file: it adds no tag, link, image or cell to Markdown."""
    return " ".join(name.split()).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def text_of_rows(table: Table) -> list[str]:
    """Return success in percent by recipe and horizon; the contrasts; and how to read both."""
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
            lines.append(["*start*", "", *(spread_of(start[key]) for key in keys), "", "", "", ""])
            shown_start = start
        spreads = [spread_of(row["success"][key]) for key in keys]
        lines.append([*titles_of(row, row["name"]), *spreads, *_gains(row, average)])
    return markdown(head, lines, right=2)


def titles_of(row: RowJson, name: str) -> tuple[str, str]:
    """Return the two first columns: recipe and horizon, if `name` is only these; else the name."""
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
    return [
        gain(row["gain"][average]),
        gain(row["gain"]["greedy"]),
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
        seeds = ", ".join(points(value) for value in difference[average]["per_seed"])
        name = literal(f"{contrast['a']} − {contrast['b']}")
        gains = [gain(difference[key]) for key in keys]
        lines.append([name, *gains, seeds, _limit(contrast, average)])
    return "Paired differences, in points:\n\n" + markdown(head, lines, right=1)


def _limit(contrast: Mapping[str, Any], average: str) -> str:
    """Return `ceiling` or `floor`, with ` (greedy)` if only of greedy success; else nothing."""
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


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], *, right: int) -> str:
    """Return a Markdown table, padded for plain text. right: the first right-aligned column."""
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
