"""The table of a comparison for a paper: CSV with every number, and LaTeX for `booktabs`. Pure
functions of the result of `results.table`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.comparison.figures import Table
from agentgym.pages import gain, label, spread

FIELDS = ("kind", "name", "environment", "metric", "mean", "low", "high", "sd", "per_seed")
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "±": r"$\pm$",
}


def table_csv(table: Table) -> bytes:
    """Return a line for each number of each row and contrast: shares of 1, with the bounds of their
    intervals, the deviation over seeds, and the value of each seed, separated by spaces. A text
    that a spreadsheet would read as a formula begins with an apostrophe.
    """
    output = io.StringIO()
    writer = csv.DictWriter(output, FIELDS, lineterminator="\n")
    writer.writeheader()
    for kind, name, environment, estimates in numbers(table):
        for metric, estimate in estimates.items():
            parts = {part: estimate.get(part) for part in ("mean", "low", "high", "sd")}
            texts = {"kind": kind, "name": name, "environment": environment, "metric": metric}
            seeds = " ".join(map(str, estimate["per_seed"]))
            quoted = {
                key: f"'{text}" if text[:1] in "=+-@\t\r" else text
                for key, text in texts.items()
                if text
            }
            writer.writerow({**quoted, **parts, "per_seed": seeds})
    return output.getvalue().encode()


def table_latex(table: Table) -> bytes:
    """Return the rows as one `tabular`: success and, where rows have them, gains in points."""
    rows = table["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row["success"]))
    average = next((key for key in keys if key.startswith("avg")), None)
    has_gain = average is not None and any("gain" in row for row in rows)
    grid = bool(table.get("environments"))
    head = [
        "recipe and horizon",
        *(["environment"] if grid else []),
        *(f"{label(key)}, %" for key in keys),
        *([f"{label(average)} gain, points"] if average is not None and has_gain else []),
    ]
    lines = []
    for row in rows:
        cells = [row["name"], *([row.get("environment", "")] if grid else [])]
        cells += [spread(row["success"][key]) if key in row["success"] else "" for key in keys]
        if has_gain:
            cells.append(gain(row["gain"][average]) if "gain" in row else "")
        lines.append(cells)
    columns = "l" * (2 if grid else 1) + "r" * (len(head) - (2 if grid else 1))
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _line(head),
            r"\midrule",
            *map(_line, lines),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    ).encode()


def numbers(table: Table) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield (kind, name, environment, metric -> estimate) of all rows and contrasts. kind: success,
    start, gain or difference; a row without a start or a gain has no metrics of it.
    """
    for row in table["rows"]:
        for kind in ("success", "start", "gain"):
            yield kind, row["name"], row.get("environment", ""), row.get(kind, {})
    for contrast in table["contrasts"]:
        name, environment = f"{contrast['a']} - {contrast['b']}", contrast.get("environment", "")
        yield "difference", name, environment, contrast["difference"]


def _line(cells: Sequence[str]) -> str:
    escaped = ("".join(_LATEX.get(sign, sign) for sign in " ".join(cell.split())) for cell in cells)
    return " & ".join(escaped) + r" \\"
