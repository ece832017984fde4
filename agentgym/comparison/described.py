"""A comparison as its YAML file describes it: recipes, horizons, environments and seeds, each with
changes to params.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, ValidationError, model_validator

from agentgym.config import ConfigError, Section, first_line, read_tree
from agentgym.config.load import merge

Layer = dict[str, Any]  # shaped like params.yaml
Seeds = tuple[NonNegativeInt, ...]


DEFAULT = "comparisons/default.yaml"


def file_and_overrides(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split words into (file or DEFAULT, overrides with `=`). Errors: ConfigError for two files."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"expected one comparison file, got {', '.join(files)}")
    return (files or [DEFAULT])[0], tuple(word for word in words if "=" in word)


class Matrix(Section):
    """Rows of the table: each of these recipes with each of these horizons; None: all of them."""

    recipes: tuple[str, ...] | None = None
    horizons: tuple[str, ...] | None = None


class ExtraCell(Section):
    """One more row of the table: its recipe, its horizon, or both, and further changes."""

    recipe: str = ""
    horizon: str = ""
    name: str = ""  # default: recipe and horizon
    set: Layer = Field(default_factory=dict)
    until: str = ""  # its last step; default: the comparison's
    seeds: Seeds = ()  # default: the comparison's
    group: str = ""  # rows of one group stand together, for readers of the result

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.name or self.recipe or self.horizon):
            raise ValueError(
                "a cell under `cells` has neither name, recipe nor horizon; give it a name"
            )
        return self


class Column(Section):
    """An environment as a column of the table, and the changes to every row's settings in it."""

    params: Path | None = None  # in place of the comparison's; relative to its file
    set: Layer = Field(default_factory=dict)
    # changes of a recipe or a horizon in this column, over its changes everywhere; a layer may
    # begin with `extends: FILE`, a parameter file that it is laid over
    recipes: dict[str, Layer] = Field(default_factory=dict)
    horizons: dict[str, Layer] = Field(default_factory=dict)

    def beside(self, folder: Path) -> Self:
        """Return the column with paths resolved in `folder` and each `extends` read and merged.
        Errors: ConfigError.
        """
        read = {
            part: {name: _read(layer, folder) for name, layer in getattr(self, part).items()}
            for part in ("recipes", "horizons")
        }
        params = None if self.params is None else folder / self.params
        return self.model_copy(update={"params": params, "set": _read(self.set, folder), **read})


def _read(layer: Layer, folder: Path) -> Layer:
    """Return a layer, merged over the parameter file that its `extends` names, if any. folder: of
    relative paths. Errors: ConfigError.
    """
    base = layer.get("extends")
    if base is None:
        return layer
    changes = {name: value for name, value in layer.items() if name != "extends"}
    return merge(read_tree(folder / str(base)), changes)


class Comparison(Section):
    """A comparison, as its file describes it."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]*$")  # of the files it writes
    title: str = ""
    params: Path = Path("params.yaml")  # relative to the comparison's file
    overrides: Layer = Field(default_factory=dict)  # over `params`, for every cell
    recipes: dict[str, Layer]
    horizons: dict[str, Layer]
    matrix: Matrix = Matrix()
    cells: tuple[ExtraCell, ...] = ()
    # columns: every row in each environment, evaluated like `agentgym evaluate`, by this protocol
    # (of profiles/eval, or a file; empty: that of the run's own evaluations) with these changes
    environments: dict[str, Column] = Field(default_factory=dict)
    protocol: str = ""
    changes: Layer = Field(default_factory=dict)
    seeds: Seeds = Field(default=(0, 1, 2), min_length=1)
    # [a, b]: a minus b; two rows, two horizons (per recipe) or two recipes (per horizon)
    contrasts: tuple[tuple[str, str], ...] = ()
    # last step of every cell; default: the evaluation of its last checkpoint. register and report
    # are later steps
    until: str = ""
    # seconds a cell waits for a shared step that another cell is running
    wait_s: PositiveFloat = 3600.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.protocol or self.changes) and not self.environments:
            raise ValueError(
                "protocol and changes are of comparisons with environments; leave them out, or"
                " name the environments"
            )
        for name, column in self.environments.items():
            for part, layers, known in (
                ("recipes", column.recipes, self.recipes),
                ("horizons", column.horizons, self.horizons),
            ):
                if unknown := sorted(layers.keys() - known.keys()):
                    raise ValueError(
                        f"environments.{name}.{part}: {unknown[0]!r} is none of"
                        f" {', '.join(known) or 'none'}"
                    )
        return self


def load_comparison(path: Path | str) -> Comparison:
    """Load a comparison's file and the files that it extends. Errors: ConfigError with one line."""
    path = Path(path)
    tree = read_tree(path)
    try:
        comparison = Comparison.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error, Comparison)}") from None
    columns = {name: column.beside(path.parent) for name, column in comparison.environments.items()}
    here = {"params": path.parent / comparison.params, "environments": columns}
    return comparison.model_copy(update=here)


@dataclass(frozen=True)
class DescribedRow:
    """One row of the table in one column, with the settings of its runs."""

    name: str  # unique among all rows and columns
    recipe: str
    horizon: str
    group: str
    until: str  # its last step; empty: the last stage, or the last evaluation without columns
    seeds: Seeds
    params: Path
    layers: tuple[Layer, ...]  # each one is laid over the previous one
    environment: str = ""
    method: str = ""  # its name in every column


def described_rows(comparison: Comparison) -> Iterator[DescribedRow]:
    """Yield a row per method and environment, or per method if no environments are named.
    Errors: ConfigError for an undefined name.
    """
    matrix = comparison.matrix
    recipes = _known(matrix.recipes, comparison.recipes, "recipe", "matrix.recipes")
    horizons = _known(matrix.horizons, comparison.horizons, "horizon", "matrix.horizons")
    product = [ExtraCell(recipe=name, horizon=horizon) for name in recipes for horizon in horizons]
    for cell in (*product, *comparison.cells):
        method = cell.name or " ".join(filter(None, (cell.recipe, cell.horizon)))
        where = f"cell {method}"
        _known([cell.recipe] if cell.recipe else [], comparison.recipes, "recipe", where)
        _known([cell.horizon] if cell.horizon else [], comparison.horizons, "horizon", where)
        for name, column in (comparison.environments or {"": Column()}).items():
            yield DescribedRow(
                f"{method} in {name}" if name else method,
                cell.recipe,
                cell.horizon,
                cell.group,
                cell.until or comparison.until,
                cell.seeds or comparison.seeds,
                column.params or comparison.params,
                (
                    comparison.overrides,
                    column.set,
                    comparison.recipes.get(cell.recipe, {}),
                    comparison.horizons.get(cell.horizon, {}),
                    column.recipes.get(cell.recipe, {}),
                    column.horizons.get(cell.horizon, {}),
                    cell.set,
                ),
                name,
                method,
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
