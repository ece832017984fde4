"""Recipes that are not yet part of a book, and invented ones made of the words of known ones: any
number of goals that take one level of crafting.

The game has 124 such goals. A policy trained on 84 of them memorizes them; with thousands it has to
learn to read recipes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

GRID_CELLS = 9
MOST = 20_000
SHORTEST_WORD = 3  # excludes `on` and `a` of "carrot on a stick"
_ID = re.compile(r"#?[a-z0-9_.:/-]+")


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as it was read or invented; names are ids without `minecraft:`, generic
    ingredients begin with #. Errors: ValueError for a bad name or count, or too many ingredients.
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


def invent(number: int, known: Iterable[Draft]) -> list[Draft]:
    """Return `number` invented recipes.
    Their items occur in no known recipe, no two make the same item, and all ingredients can be
    fetched.

    The recipes are equal on every machine, and a shorter list is a prefix of a longer one.
    """
    names = {
        name.removeprefix("#")
        for draft in known
        for name in (draft.output, *(part for part, _ in draft.ingredients))
    }
    parts = [name.split("_") for name in sorted(names)]
    ends = sorted({words[-1] for words in parts})
    begins = sorted({word for words in parts for word in words[:-1] if len(word) >= SHORTEST_WORD})
    single = sorted({*begins, *ends} - names)
    # a book leaves out recipes whose only ingredient is a block
    ingredient_ends = [end for end in ends if end != "block"]
    # Random hashes a str with sha512, so the draws are the same on every machine
    chance = random.Random("invented recipes")  # noqa: S311
    outputs, ingredients = set(names), set(names)

    def name(first: str, last: list[str], *taken: set[str]) -> str:
        while True:
            candidate = "_".join(
                [first, *chance.sample(begins, chance.choice((0, 0, 0, 1))), chance.choice(last)]
            )
            if not any(candidate in used for used in taken):
                return candidate

    drafts = []
    for _ in range(number):
        output = name(chance.choice(begins), ends, outputs, ingredients)
        outputs.add(output)
        chosen = set()
        for _ in range(chance.choice((1, 1, 1, 1, 2, 3))):
            if chance.random() < 1 / 3:
                chosen.add(chance.choice(single))
            else:  # often of the output's material, like planks from a log
                is_same = chance.random() < 1 / 2
                material = output.partition("_")[0] if is_same else chance.choice(begins)
                chosen.add(name(material, ingredient_ends, outputs))
        ingredients |= chosen
        count = chance.choice((1, 1, 1, 2, 3, 4, 6, 8, 16))
        parts_used = tuple((part, chance.randint(1, 9)) for part in sorted(chosen))
        drafts.append(Draft(output, count, parts_used))
    return drafts
