"""Runs of a comparison: its recipes, horizons, environments and seeds become ordinary runs.

A cell is a run like any other, under the keys it would have alone: cells share equal steps with
each other and with `make pipeline`, and a finished cell is finished for every comparison it belongs
to. Its numbers are those of the run's own evaluation. If environments are the columns, its numbers
are those of `agentgym evaluate` for its last checkpoint and for the one it trained from.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import yaml

from agentgym.comparison.described import Comparison, DescribedRow, described_rows
from agentgym.config import ConfigError, RunConfig, config_digest, load_config
from agentgym.evaluation.protocol import EvaluationProtocol, EvaluationRequest
from agentgym.evaluation.result import differences
from agentgym.pipeline.child import run_command
from agentgym.pipeline.policy_evaluation import answered, protocol_for
from agentgym.pipeline.table import finished, open_store, run_key, steps_of, with_parents
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest
from agentgym.store.posix import write_whole


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    row: str
    recipe: str
    horizon: str
    group: str
    seed: int
    until: str  # its last step
    cfg: RunConfig
    environment: str = ""  # its column, if environments are the columns
    method: str = ""  # its row's name in every column
    protocol: EvaluationProtocol | None = None  # of its evaluations in this column

    @property
    def title(self) -> str:
        return f"{self.row} seed {self.seed}"

    @cached_property
    def run_key(self) -> str:
        return run_key(self.cfg)

    @property
    def slug(self) -> str:
        """Readable and unique name for files."""
        return f"{re.sub('[^a-z0-9]+', '-', self.title.lower()).strip('-')}-{self.run_key[:8]}"

    @property
    def steps(self) -> tuple[str, ...]:
        return with_parents(self.cfg, self.until)

    @property
    def evaluation(self) -> str:
        """Name of the step with the cell's numbers: the last evaluation among its steps."""
        table = steps_of(self.cfg)
        return [name for name in self.steps if table[name].kind is Kind.EVALUATE][-1]

    @property
    def start(self) -> str:
        """Step whose checkpoint the cell's training began with; empty if it trains nothing."""
        table = steps_of(self.cfg)
        return next((table[name].checkpoint for name in self.steps if table[name].stage), "")

    @property
    def judged(self) -> tuple[str, ...]:
        """Names of the steps whose checkpoints `protocol` evaluates: the start and the last one."""
        return tuple(filter(None, (self.start, self.until))) if self.protocol else ()

    def answers(self) -> dict[str, Manifest] | None:
        """Return the finished evaluations of the checkpoints in `judged`, by step. None if the cell
        or one of them is not finished, or its data are not on this machine. Errors: ConfigError.
        """
        if not all(folder.is_dir() for folder in self.cfg.data_folders.values()):
            return None
        completed = finished(self.cfg, open_store(self.cfg))
        if self.until not in completed:
            return None
        answers = {}
        for step in self.judged:
            assert self.protocol is not None
            answer = answered(self.cfg, f":{step}", self.protocol)
            if answer is None:
                return None
            answers[step] = answer
        return answers

    def is_done(self) -> bool:
        return self.answers() is not None


def cells_of(comparison: Comparison, overrides: Sequence[str] = ()) -> tuple[Cell, ...]:
    """Return every cell, row by row: neighbors differ in seed and seldom wait for each other.
    overrides: `key.path=value` over all settings of a cell.
    Errors: ConfigError, also for no cell, two rows of one name or two cells that are the same run.
    """
    rows = list(described_rows(comparison))
    for name in sorted({row.name for row in rows}):
        if sum(row.name == name for row in rows) > 1:
            raise ConfigError(f"two rows are called {name!r}; give one of them another name")
        if {"'", '"'} <= set(name):
            raise ConfigError(f"{name}: MLflow finds no name with both ' and \"; leave one out")
    if not rows:
        raise ConfigError("the comparison has no cell; name recipes and horizons, or cells")
    cells = tuple(_cell(comparison, row, seed, overrides) for row in rows for seed in row.seeds)
    owners: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        other = owners.setdefault((config_digest(cell.cfg.semantic()), cell.until), cell)
        if other is not cell:
            raise ConfigError(
                f"{other.title} and {cell.title} are the same run; remove one, or change what sets"
                " them apart"
            )
    return cells


def comparison_key(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """Return a digest of all that changes the table, except for its title, 64 hex digits."""
    return config_digest(
        {
            "name": comparison.name,
            "contrasts": [list(pair) for pair in comparison.contrasts],
            "cells": [
                [c.row, c.run_key, c.until, *([c.protocol.semantic()] if c.protocol else [])]
                for c in cells
            ],
        }
    )


def names_in(cells: Sequence[Cell]) -> dict[str, str]:
    """Return the names of all recipes, horizons, environments and seeds, as lists, and the number
    of cells.
    """
    of_cells = [(cell.recipe, cell.horizon, cell.cfg.env_names, cell.seed) for cell in cells]
    names = ("recipes", "horizons", "environments", "seeds")
    lists = zip(names, zip(*of_cells, strict=True), strict=True)
    listed = {name: ", ".join(dict.fromkeys(map(str, values))) for name, values in lists}
    return {**listed, "cells": str(len(cells))}


def contrast_rows(comparison: Comparison, cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Return the pairs (a, b) of row names of all contrasts. A contrast of two methods, horizons or
    recipes has a pair per environment, recipe or horizon, within each group.
    Errors: ConfigError if a contrast names no two rows, or rows that are not evaluated alike.
    """
    first = {cell.row: cell for cell in reversed(cells)}
    pairs = []
    for a, b in comparison.contrasts:
        if a in first and b in first:
            matches = [(a, b)]
        else:
            matches = []
            for x, y in itertools.product(reversed(first), repeat=2):
                one, two = first[x], first[y]
                named = (
                    (one.environment and (one.method, two.method) == (a, b))
                    or (one.horizon, two.horizon, one.recipe) == (a, b, two.recipe)
                    or (one.recipe, two.recipe, one.horizon) == (a, b, two.horizon)
                )
                if named and (one.group, one.environment) == (two.group, two.environment):
                    matches.append((x, y))
        if not matches:
            raise ConfigError(
                f"contrasts: [{a}, {b}] names no two rows, nor two horizons of one recipe, nor two"
                " recipes of one horizon"
            )
        for x, y in matches:
            _check_comparable(first[x], first[y])
        pairs += matches
    return list(dict.fromkeys(pairs))


def run_cell(cell: Cell, *, wait_s: float, stop: threading.Event | None = None) -> None:
    """Run a cell's steps, then the evaluations of its column, if any, each in a child process.
    Protocol, parameters and logs are written to the state folder.
    wait_s, stop, errors: as `run_command`; errors have the cell's title.
    """
    folder = f"cells/{cell.slug}"
    run_command(
        ("step", cell.until, "--with-parents"),
        cell.cfg,
        title=cell.title,
        place=folder,
        wait_s=wait_s,
        stop=stop,
    )
    if cell.protocol is None:
        return
    protocol = cell.cfg.state_dir / f"{folder}-protocol.yaml"
    tree = cell.protocol.model_dump(mode="json")
    write_whole(protocol, yaml.safe_dump(tree, sort_keys=False).encode())
    for step in cell.judged:
        run_command(
            ("evaluate", f":{step}", "--protocol", str(protocol)),
            cell.cfg,
            title=f"{cell.title}, evaluation of {step}",
            place=f"{folder}-{step}",
            wait_s=wait_s,
            stop=stop,
        )


def _cell(comparison: Comparison, row: DescribedRow, seed: int, overrides: Sequence[str]) -> Cell:
    title = f"{row.name} seed {seed}"
    try:
        cfg = load_config(row.params, overrides, layers=(*row.layers, {"seed": seed}))
        names, column = (row.name, row.recipe, row.horizon, row.group), row.environment
        until = row.until or _last_step(cfg, trained=bool(column))
        protocol = _protocol(comparison, cfg) if column else None
        cell = Cell(*names, seed, until, cfg, column, row.method, protocol)
        _check_judged(cell)
    except ConfigError as error:
        raise ConfigError(f"{title}: {error}") from None
    if cfg.seed != seed:
        raise ConfigError(
            f"{title}: seed is overridden by {cfg.seed}; name the seeds in the comparison's file"
        )
    return cell


def _last_step(cfg: RunConfig, *, trained: bool) -> str:
    """Return the name of a run's last stage (`trained`), or of its last evaluation."""
    table = steps_of(cfg)
    return [
        name
        for name, step in table.items()
        if (step.stage is not None if trained else step.kind is Kind.EVALUATE)
    ][-1]


def _protocol(comparison: Comparison, cfg: RunConfig) -> EvaluationProtocol:
    """Return the protocol of a cell in an environment's column. Errors: ConfigError."""
    if len(cfg.envs) > 1:
        raise ConfigError(
            f"its run has the environments {cfg.env_names}; a column of a comparison is one, so"
            " leave `mix` empty there"
        )
    settings = {"protocol": comparison.protocol, "changes": comparison.changes}
    any_policy = {"policy": ":any", "envs": (cfg.env.name,)}
    return protocol_for(cfg, EvaluationRequest.model_validate(any_policy | settings))


def _check_judged(cell: Cell) -> None:
    table = steps_of(cell.cfg)
    if cell.protocol is not None:
        if cell.until in table and table[cell.until].kind in (Kind.INITIALIZE, Kind.TRAIN):
            return
        raise ConfigError(
            f"it ends with {cell.until}, which has no checkpoint to evaluate; let it end with a"
            " step that trains"
        )
    if not any(table[name].kind is Kind.EVALUATE for name in cell.steps):
        raise ConfigError(
            f"it ends with {cell.until} and evaluates nothing; let it end with an evaluation"
        )


def _check_comparable(a: Cell, b: Cell) -> None:
    """Raise ConfigError if the settings show that two rows are not evaluated alike.

    If environments are the columns, their protocols must be equal; else the sections `env` and
    `evaluation`, apart from the sampling temperature, and the split must be `test`.
    """
    if a.protocol is not None and b.protocol is not None:
        if unlike := differences(a.protocol.semantic(), b.protocol.semantic()):
            raise ConfigError(
                f"contrasts: {a.row} and {b.row} are evaluated by different protocols"
                f" ({unlike[0]}); compare rows of one environment that are evaluated alike"
            )
        return
    for name in ("env", "evaluation"):
        ours, theirs = (cell.cfg.semantic()[name] for cell in (a, b))
        free = ("evaluation", "temperature")
        differ = sorted(k for k in ours if ours[k] != theirs[k] and (name, k) != free)
        if differ:
            raise ConfigError(
                f"contrasts: {a.row} and {b.row} differ in {name}.{differ[0]}; compare rows that"
                " are evaluated alike"
            )
    if a.cfg.evaluation.split != "test":
        raise ConfigError(
            f"contrasts: {a.row} is evaluated on validation items, which differ from seed to seed;"
            " compare test results"
        )
