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
            signs = tuple("=+-@\t\r")
            quoted = {
                k: f"'{text}" if text.startswith(signs) else text for k, text in texts.items()
            }
            writer.writerow({**quoted, **parts, "per_seed": seeds})
    return output.getvalue().encode()


def table_latex(table: Table) -> bytes:
    """Return the rows as one `tabular`: success and, where rows have them, gains in points; and the
    contrasts, if there are some, as a second one.
    """
    rows = table["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row["success"]))
    average = next((key for key in keys if key.startswith("avg")), None)
    gains = [average] if average is not None and any("gain" in row for row in rows) else []
    where = ["environment"] if table.get("environments") else []
    head = ["recipe and horizon", *where, *(f"{label(key)}, %" for key in keys)]
    lines = [
        [
            *(row["name"], *(row.get(name, "") for name in where)),
            *(spread(row["success"][key]) if key in row["success"] else "" for key in keys),
            *(gain(row["gain"][key]) if "gain" in row else "" for key in gains),
        ]
        for row in rows
    ]
    head += [f"{label(key)} gain, points" for key in gains]
    tables = [r"% \usepackage{booktabs}", *_tabular(head, lines, 1 + len(where))]
    if table["contrasts"]:
        head = ["difference", *where, *(f"{label(key)}, points" for key in keys)]
        lines = []
        for contrast in table["contrasts"]:
            pair, gains_of = f"{contrast['a']} − {contrast['b']}", contrast["difference"]
            names = pair, *(contrast.get(name, "") for name in where)
            lines.append([*names, *(gain(gains_of[k]) if k in gains_of else "" for k in keys)])
        tables += ["", *_tabular(head, lines, 1 + len(where))]
    return "\n".join([*tables, ""]).encode()


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


def _tabular(head: Sequence[str], lines: Sequence[Sequence[str]], num_names: int) -> list[str]:
    columns = "l" * num_names + "r" * (len(head) - num_names)
    begin = rf"\begin{{tabular}}{{{columns}}}"
    body = r"\toprule", _line(head), r"\midrule", *map(_line, lines), r"\bottomrule"
    return [begin, *body, r"\end{tabular}"]


def _line(cells: Sequence[str]) -> str:
    escaped = ("".join(_LATEX.get(sign, sign) for sign in " ".join(cell.split())) for cell in cells)
    return " & ".join(escaped) + r" \\"
