"""A recipe as it was read or invented, before it is part of a book."""

from __future__ import annotations

import re
from dataclasses import dataclass

GRID_CELLS = 9
_ID = re.compile(r"#?[a-z0-9_.:/-]+")


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as it was read or invented; names are ids without `minecraft:`, generic
    ingredients begin with #.
    """

    output: str
    count: int
    ingredients: tuple[tuple[str, int], ...]
    kind: str = ""  # the generic ingredient that its output may stand for

    def __post_init__(self) -> None:
        if len(self.ingredients) > GRID_CELLS:
            raise ValueError(f"{len(self.ingredients)} ingredients in a grid of {GRID_CELLS} cells")
        for name, n in ((self.output, self.count), *self.ingredients):
            if not _ID.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an item")
            if n < 1:
                raise ValueError(f"{n} {name}")
