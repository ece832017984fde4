"""Presentation of a comparison: by rows of recipes and horizons, or as a grid if environments are
its columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.comparison import grid, report
from agentgym.comparison.report import Table


def result_files(table: Table) -> dict[str, bytes]:
    """Return the files of a comparison, by file name: table as JSON and as text, and figures."""
    return (grid.grid_files if table.get("environments") else report.result_files)(table)


def table_markdown(table: Table) -> str:
    """Return the tables and how to read them, as Markdown."""
    return (grid.grid_markdown if table.get("environments") else report.table_markdown)(table)


def logged_tables(table: Table) -> dict[str, bytes]:
    """Return the same numbers as MLflow tables, by file name: a line per row, and per contrast."""
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
    return {name: _split(lines) for name, lines in tables.items() if lines}


def _numbers(prefix: str, estimates: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{prefix}{key}{end}": round(estimate[part], 4)
        for key, estimate in estimates.items()
        for part, end in (("mean", ""), ("low", " low"), ("high", " high"))
    }


def _split(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Return an MLflow table. Columns are in order of first appearance; rows need not have all."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    data = [[line.get(name) for name in columns] for line in lines]
    return json.dumps({"columns": columns, "data": data}, separators=(",", ":")).encode()
