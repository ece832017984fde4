"""Comparison of recipes, horizons, environments and seeds: ordinary runs, then one table."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture, as_completed
from prefect.logging.handlers import PrefectConsoleHandler

from agentgym.commands.parser import positive
from agentgym.comparison.described import DEFAULT, file_and_overrides, load_comparison
from agentgym.comparison.matrix import Cell, cells_of, contrast_rows
from agentgym.comparison.results import write_comparison
from agentgym.comparison.tables import table_markdown
from agentgym.console.ending import guarded
from agentgym.console.progress import Bars, PlainConsole
from agentgym.data.check import load_data
from agentgym.deploy.local import check_local_env
from agentgym.evaluation.protocol import items_of
from agentgym.pipeline.contenders import playing_config
from agentgym.pipeline.plan import check_model
from agentgym.private import private_state
from agentgym.tracking.deliver import tracker_of
from flows.shell import prefect_running
from services.recovery import begin_attempt
from tasks.comparison import cell_task, write_task
from tasks.dataset import dataset_pointer, pull_data

FOLDER = "comparisons"  # of tables and figures, in the folder of the state


class CellsFailed(RuntimeError):
    """Some cells (runs of the comparison) failed; the others are done and in the table."""


@flow(name="compare", flow_run_name="{comparison}", persist_result=False)
def compare(
    comparison: str = DEFAULT, overrides: tuple[str, ...] = (), parallel: int = 0, out: str = ""
) -> None:
    """Run every cell that is not done, some at a time, and write the table of all; a killed
    comparison continues from its last commits.

    comparison: its file; overrides: `key.path=value` for every cell; parallel: cells at a time, 0
    for one per core;
    out: folder of the table and figures, empty: `comparisons` next to the store.
    A failed cell does not end the others.
    Errors: CellsFailed that names them.
    """
    described = load_comparison(comparison)
    cells = cells_of(described, overrides)
    begin_attempt()
    for path in sorted({folder for cell in cells for folder in cell.cfg.data_folders.values()}):
        pull_data(path)
    waiting = [cell for cell in cells if not cell.is_done()]
    for cfg in {cell.cfg.tracking_uri: cell.cfg for cell in waiting}.values():
        _ = tracker_of(cfg).experiment_id  # concurrent cells must not create the same database
    with Bars(PlainConsole()) as bars:
        failed = _run_cells(waiting, parallel or _num_cores(), described.wait_s, bars)
    write_task(described, cells, _folder(out, cells))
    if failed:
        raise CellsFailed(
            f"{len(failed)} of {len(cells)} cells failed, the others are in the table"
            + "".join(f"\n  {line}" for line in failed)
        )


def _folder(out: str, cells: Sequence[Cell]) -> Path:
    """Return the folder of the table and figures: `out`, or next to the store, ignored by git."""
    return Path(out) if out else cells[0].cfg.state_dir / FOLDER


def _run_cells(cells: Sequence[Cell], parallel: int, wait_s: float, bars: Bars) -> list[str]:
    """Run cells, at most `parallel` at a time. Result: an error text for each cell that failed.
    wait_s: how long a cell waits for work that another process does.
    """
    bars.start("cells", len(cells))
    stop, failed = threading.Event(), []
    running: dict[PrefectFuture[Any], tuple[Cell, float]] = {}

    def one_ends() -> None:
        future = next(as_completed(list(running)))
        cell, began = running.pop(future)
        error = future.result(raise_on_failure=False)
        if isinstance(error, BaseException):
            failed.append(str(error))
        ending = "FAILED" if error else "done"
        bars.advance(1, f"{cell.title}: {ending} after {time.monotonic() - began:.0f} s")

    try:
        for cell in cells:
            if len(running) >= parallel:
                one_ends()
            running[cell_task(cell).submit(cell, wait_s, stop)] = (cell, time.monotonic())
        while running:
            one_ends()
    finally:
        stop.set()  # cells still run if this process was interrupted
    return failed


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit code: 0 done, 1 a cell failed, 2 bad input (nothing was started),
    130 interrupted (state is resumable).
    """
    parser = argparse.ArgumentParser(
        prog="python -m flows.compare", description=compare.description
    )
    add, cores = parser.add_argument, "cells at a time (default: one per core)"
    add("--parallel", type=positive, default=0, metavar="N", help=cores)
    folder = f"of the table and figures (default: {FOLDER} next to the store)"
    add("--out", default="", metavar="FOLDER", help=folder)
    words = f"the comparison (default: {DEFAULT}); overrides for every cell"
    add("words", nargs="*", metavar="FILE | key.path=value", help=words)
    arguments = parser.parse_intermixed_args(argv)
    return guarded(lambda: _run(arguments, PlainConsole()))


def _run(arguments: argparse.Namespace, console: PlainConsole) -> int:
    comparison, overrides = file_and_overrides(arguments.words)
    described = load_comparison(comparison)
    cells = cells_of(described, overrides)
    out = _folder(arguments.out, cells)
    contrast_rows(described, cells)  # raises its errors before anything starts
    for state_dir in {cell.cfg.state_dir for cell in cells}:
        private_state(state_dir)
    waiting = _waiting(cells)
    done = f"{len(cells) - len(waiting)} of {len(cells)} cells are done"
    console.print(f"[bold]compare[/bold]: {done}", highlight=False)
    failure = None
    if waiting:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)  # a failed cell is named at the end, in one line
        with prefect_running(cells[0].cfg.state_dir, console):
            try:
                compare(comparison, overrides, arguments.parallel, arguments.out)
            except CellsFailed as error:
                failure = error
    result = write_comparison(described, cells, out)
    console.print(table_markdown(result), markup=False, highlight=False, soft_wrap=True)
    files = f"{out}/{described.name}.json, .md, .csv, .tex, .png and .svg"
    console.print(f"written to {files}", highlight=False)
    if failure:
        raise failure
    return 0


def _waiting(cells: Sequence[Cell]) -> list[Cell]:
    """Check and return the cells that are not done. Data that is not pulled yet is not checked, and
    its cells count as not done. Errors: ConfigError.
    """

    def is_pulled(cell: Cell) -> bool:
        return all(folder.is_dir() for folder in cell.cfg.data_folders.values())

    waiting = []
    for cell in cells:
        for setting, folder in cell.cfg.data_folders.items():
            dataset_pointer(folder, setting)
        if not (is_pulled(cell) and cell.is_done()):
            waiting.append(cell)
    for env in {env.model_dump_json(): env for cell in waiting for env in cell.cfg.envs}.values():
        check_local_env(env)
    configs = [cell.cfg for cell in waiting]
    models = {c.model.model_dump_json() + c.lora.model_dump_json(): c for c in configs}
    for cfg in models.values():
        check_model(cfg.model, cfg.lora)
    pulled = [cell.cfg for cell in waiting if is_pulled(cell)]
    for cfg in {
        str((c.seed, c.data, c.env_names, c.evaluation, c.rollout.items_per_step)): c
        for c in pulled
    }.values():
        load_data(cfg)
    for cell in waiting:
        if cell.protocol is not None and cell.cfg in pulled:
            items_of(cell.protocol, cell.cfg)
            playing_config(cell.cfg, cell.protocol, "")
    return waiting


if __name__ == "__main__":
    sys.exit(main())
