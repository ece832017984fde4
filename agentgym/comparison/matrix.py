"""Which runs a comparison is made of: a YAML file of recipes, horizons and seeds becomes a list of
ordinary runs.

A cell is a run like any other, under the keys it would have alone: cells share equal steps with
each other and with `make pipeline`, and one that is done is done for every comparison it belongs
to.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, ValidationError, model_validator

from agentgym.config import (
    ConfigError,
    RunConfig,
    Section,
    config_digest,
    first_line,
    load_config,
    read_tree,
)
from agentgym.pipeline.child import run_child
from agentgym.pipeline.table import finished, open_store, run_key, steps_of, with_parents
from agentgym.steps.step import Kind

logger = logging.getLogger(__name__)

Layer = dict[str, Any]  # shaped like params.yaml
Seeds = tuple[NonNegativeInt, ...]


DEFAULT = "comparisons/default.yaml"


def file_and_overrides(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Of a command line's words: the comparison's file (by default ours) and `key.path=value`s.

    Errors: ConfigError where two words are files.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"expected one comparison file, got {', '.join(files)}")
    return (files or [DEFAULT])[0], tuple(word for word in words if "=" in word)


class Matrix(Section):
    """Every one of these recipes with every one of these horizons; None: all that are defined."""

    recipes: tuple[str, ...] | None = None
    horizons: tuple[str, ...] | None = None


class ExtraCell(Section):
    """One more row of the table: a recipe, a horizon, or both, and what else it changes."""

    recipe: str = ""
    horizon: str = ""
    name: str = ""  # default: recipe and horizon
    set: Layer = Field(default_factory=dict)
    until: str = ""  # its last step; default: the comparison's
    seeds: Seeds = ()  # default: the comparison's
    group: str = ""  # rows of one group stand together; for whoever reads the result

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.name or self.recipe or self.horizon):
            raise ValueError(
                "a cell under `cells` has neither name, recipe nor horizon; give it a name"
            )
        return self


class Comparison(Section):
    """A comparison as its file says it."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]*$")  # of the files it writes
    title: str = ""
    params: Path = Path("params.yaml")  # relative to the comparison's file
    overrides: Layer = Field(default_factory=dict)  # over `params`, for every cell
    recipes: dict[str, Layer]
    horizons: dict[str, Layer]
    matrix: Matrix = Matrix()
    cells: tuple[ExtraCell, ...] = ()
    seeds: Seeds = Field(default=(0, 1, 2), min_length=1)
    # [a, b]: a minus b; two rows, two horizons (per recipe) or two recipes (per horizon)
    contrasts: tuple[tuple[str, str], ...] = ()
    # last step of every cell; default: the evaluation of its last checkpoint. register and report
    # go further
    until: str = ""
    # how long a cell waits for a step it shares with one that is at work on it
    wait_s: PositiveFloat = 3600.0


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

    @property
    def title(self) -> str:
        return f"{self.row} seed {self.seed}"

    @cached_property
    def run_key(self) -> str:
        return run_key(self.cfg)

    @property
    def slug(self) -> str:
        """For file names: readable, and its own."""
        return f"{re.sub('[^a-z0-9]+', '-', self.title.lower()).strip('-')}-{self.run_key[:8]}"

    @property
    def steps(self) -> tuple[str, ...]:
        return with_parents(self.cfg, self.until)

    @property
    def evaluation(self) -> str:
        """The evaluation its numbers come from: the last one among its steps."""
        table = steps_of(self.cfg)
        return [name for name in self.steps if table[name].kind is Kind.EVALUATE][-1]

    def is_done(self) -> bool:
        return self.until in finished(self.cfg, open_store(self.cfg))


def load_comparison(path: Path | str) -> Comparison:
    """Errors: ConfigError with one line for a missing file, broken YAML, or an unknown key."""
    path = Path(path)
    tree = read_tree(path)
    try:
        found = Comparison.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error, Comparison)}") from None
    return found.model_copy(update={"params": path.parent / found.params})


def cells_of(comparison: Comparison, overrides: Sequence[str] = ()) -> tuple[Cell, ...]:
    """Every cell, row by row.
    Neighbours have different seeds and so share no step: cells side by side seldom wait.

    overrides: `key.path=value` over everything a cell says.
    Errors: ConfigError that names the cell.
    """
    rows = list(_rows(comparison))
    for name in sorted({row.name for row in rows}):
        if sum(row.name == name for row in rows) > 1:
            raise ConfigError(f"two rows are called {name!r}; give one of them another name")
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
    """Names a comparison with all that changes its table, 64 hex digits."""
    contrasts = [list(pair) for pair in comparison.contrasts]
    return config_digest(
        {
            "name": comparison.name,
            "contrasts": contrasts,
            "cells": [[c.row, c.run_key, c.until] for c in cells],
        }
    )


def contrast_rows(comparison: Comparison, cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """The pairs of rows that `contrasts` asks for.
    Errors: ConfigError where a name is none, or two rows are not comparable.
    """
    first = {cell.row: cell for cell in reversed(cells)}
    pairs = []
    for a, b in comparison.contrasts:
        if a in first and b in first:
            found = [(a, b)]
        else:
            found = [
                (x, y)
                for x, y in itertools.product(reversed(first), repeat=2)
                if (first[x].horizon, first[y].horizon, first[x].recipe) == (a, b, first[y].recipe)
                or (first[x].recipe, first[y].recipe, first[x].horizon) == (a, b, first[y].horizon)
            ]
            found = [(x, y) for x, y in found if first[x].group == first[y].group]
        if not found:
            raise ConfigError(
                f"contrasts: [{a}, {b}] names no two rows, nor two horizons of one recipe, nor two"
                " recipes of one horizon"
            )
        for x, y in found:
            _check_comparable(first[x], first[y])
        pairs += found
    return list(dict.fromkeys(pairs))


def run_cell(cell: Cell, *, wait_s: float, stop: threading.Event | None = None) -> None:
    """Bring a cell to its end in a process of its own. Errors: see `run_child`, naming the cell."""
    run_child(
        cell.until,
        cell.cfg,
        title=cell.title,
        place=f"cells/{cell.slug}",
        with_parents=True,
        wait_s=wait_s,
        stop=stop,
    )


@dataclass(frozen=True)
class _Row:
    name: str
    recipe: str
    horizon: str
    group: str
    until: str
    seeds: Seeds
    layers: tuple[Layer, ...]


def _rows(comparison: Comparison) -> Iterator[_Row]:
    matrix = comparison.matrix
    recipes = _known(matrix.recipes, comparison.recipes, "recipe", "matrix.recipes")
    horizons = _known(matrix.horizons, comparison.horizons, "horizon", "matrix.horizons")
    product = [
        ExtraCell(recipe=recipe, horizon=horizon) for recipe in recipes for horizon in horizons
    ]
    for cell in (*product, *comparison.cells):
        layers = []
        for name, table, what in (
            (cell.recipe, comparison.recipes, "recipe"),
            (cell.horizon, comparison.horizons, "horizon"),
        ):
            if name:
                layers.append(table[_known([name], table, what, f"cell {cell.name or name}")[0]])
        row = cell.name or " ".join(filter(None, (cell.recipe, cell.horizon)))
        until = cell.until or comparison.until
        yield _Row(
            row,
            cell.recipe,
            cell.horizon,
            cell.group,
            until,
            cell.seeds or comparison.seeds,
            (*layers, cell.set),
        )


def _known(
    names: Sequence[str] | None, table: Mapping[str, Layer], what: str, where: str
) -> list[str]:
    for name in names or ():
        if name not in table:
            raise ConfigError(
                f"{where}: unknown {what} {name!r}; known: {', '.join(table) or 'none'}"
            )
    return list(table if names is None else names)


def _cell(comparison: Comparison, row: _Row, seed: int, overrides: Sequence[str]) -> Cell:
    title = f"{row.name} seed {seed}"
    try:
        cfg = load_config(
            comparison.params, overrides, layers=(comparison.overrides, *row.layers, {"seed": seed})
        )
        table = steps_of(cfg)
        judging = [name for name, step in table.items() if step.kind is Kind.EVALUATE]
        until = row.until or judging[-1]
        cell = Cell(row.name, row.recipe, row.horizon, row.group, seed, until, cfg)
        if not set(judging) & set(cell.steps):
            raise ConfigError(
                f"it ends with {until} and evaluates nothing; let it end with an evaluation"
            )
    except ConfigError as error:
        raise ConfigError(f"{title}: {error}") from None
    if cfg.seed != seed:
        raise ConfigError(
            f"{title}: seed is overridden by {cfg.seed}; name the seeds in the comparison's file"
        )
    return cell


def _check_comparable(a: Cell, b: Cell) -> None:
    """Paired differences need the same items played the same way; the sampling temperature may
    differ.
    """
    for name in ("env", "evaluation"):
        ours, theirs = (cell.cfg.semantic()[name] for cell in (a, b))
        differ = sorted(
            key
            for key in ours
            if ours[key] != theirs[key] and (name, key) != ("evaluation", "temperature")
        )
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
