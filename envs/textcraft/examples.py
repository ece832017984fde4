"""Worked examples: two goals of an invented book that no other book contains."""

from __future__ import annotations

from functools import cache

from envs.examples import played
from envs.textcraft.invented import Draft
from envs.textcraft.recipes import Book
from envs.textcraft.world import Options, World
from envs.wire import Example

RECIPES = (
    Draft("paper_kite", 1, (("bamboo_splint", 2), ("rice_paper", 3))),
    Draft("bamboo_splint", 4, (("bamboo_cane", 1),)),
    Draft("wind_chime", 1, (("copper_tube", 5), ("silk_cord", 1))),
    Draft("rain_barrel", 2, (("bamboo_splint", 6), ("silk_cord", 2))),
)
GOALS = ("wind chime", "paper kite")
DISTRACTORS = 1


@cache
def worked_examples() -> tuple[Example, ...]:
    book = Book(RECIPES, "the worked examples")
    options = Options(GOALS, DISTRACTORS, max_steps=0)
    return tuple(played(World(book, options), task) for task in range(len(GOALS)))
