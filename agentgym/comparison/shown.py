"""A comparison as people get it: by rows of recipes and horizons, or, where environments are its
columns, as a grid.
"""

from __future__ import annotations

from agentgym.comparison import grid, report
from agentgym.comparison.report import Table


def result_files(table: Table) -> dict[str, bytes]:
    """What a comparison leaves in a folder, by file name: table as JSON and as text, and
    figures.
    """
    return (grid.grid_files if table.get("environments") else report.result_files)(table)


def table_markdown(table: Table) -> str:
    """The tables and how to read them."""
    return (grid.grid_markdown if table.get("environments") else report.table_markdown)(table)
