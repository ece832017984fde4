"""Presentation of a comparison: by rows of recipes and horizons, or as a grid if environments are
its columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentgym.comparison.figures import figures_of_rows
from agentgym.comparison.grid import figures_of_grid, text_of_grid
from agentgym.comparison.overview import Table, literal, text_of_rows


def result_files(table: Table) -> dict[str, bytes]:
    """Return the files of a comparison, by file name: table as JSON and as text, and figures."""
    name = table["name"]
    figures = figures_of_grid if table.get("environments") else figures_of_rows
    pngs = figures(table) if table["rows"] else {}
    return {
        f"{name}.json": json.dumps(table, indent=1).encode() + b"\n",
        f"{name}.md": table_markdown(table).encode(),
        **{f"{name}{end}.png": png for end, png in pngs.items() if png is not None},
    }


def table_markdown(table: Table) -> str:
    """Return the tables and how to read them, as Markdown."""
    parts = [f"# {literal(table['title'] or table['name'])}"]
    if not table["rows"]:
        return f"{parts[0]}\n\nNo cell is done.\n"
    parts += (text_of_grid if table.get("environments") else text_of_rows)(table)
    if table["missing"]:
        names = ", ".join(map(literal, table["missing"]))
        parts.append(f"Not in the table, because not done: {names}.")
    return "\n\n".join(parts) + "\n"


def logged_tables(table: Table) -> dict[str, bytes]:
    """Return the same numbers as MLflow tables, by file name: a line per row, and per contrast."""
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


def _numbers(prefix: str, estimates: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{prefix}{key}{end}": round(estimate[part], 4)
        for key, estimate in estimates.items()
        for part, end in (("mean", ""), ("low", " low"), ("high", " high"))
    }
