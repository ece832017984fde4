"""One Prefect task run per cell of a comparison, and one that writes the results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.artifacts import create_markdown_artifact

from agentgym.comparison.described import Comparison
from agentgym.comparison.matrix import Cell, run_cell
from agentgym.comparison.results import write_comparison
from agentgym.comparison.tables import table_markdown
from agentgym.tracking.markdown import literal
from tasks.retries import retried


def cell_task(cell: Cell) -> Task[Any, None]:
    """Return the Prefect task that runs a cell (a run of the comparison), under its title."""
    return _run_cell.with_options(task_run_name=cell.title)


@retried("cell")
def _run_cell(cell: Cell, wait_s: float, stop: threading.Event) -> None:
    run_cell(cell, wait_s=wait_s, stop=stop)


@retried("table and figures", timeout_s=1800)
def write_task(comparison: Comparison, cells: Sequence[Cell], out: Path) -> None:
    """Write a comparison's table and figures to the folder `out` and, if any cell is done, to
    MLflow. Show the table on the flow run's page.
    """
    markdown = table_markdown(write_comparison(comparison, cells, out))
    key, title = f"comparison-{comparison.name}", literal(comparison.title)
    create_markdown_artifact(key=key, markdown=markdown, description=title)
