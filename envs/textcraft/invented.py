"""Made-up recipes of the words of known ones: as many goals of one level of crafting as anybody
wants to learn from.

The game has 124 such goals.
Whoever learns from 84 of them learns them by heart; of thousands only how to read a recipe helps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from envs.textcraft.draft import Draft

MOST = 20_000
SHORTEST_WORD = 3  # no `on` and `a` of "carrot on a stick"


def invent(number: int, known: Iterable[Draft]) -> list[Draft]:
    """That many recipes.
    No item of theirs is in a known recipe or made by two; their ingredients can all be fetched.

    Equal on every machine, and the first n of any number are the same n.
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
    # a recipe of one block alone would be left out
    ingredient_ends = [end for end in ends if end != "block"]
    # a str is hashed by sha512, the same everywhere
    chance = random.Random("invented recipes")  # noqa: S311
    outputs, ingredients = set(names), set(names)

    def name(first: str, last: list[str], *taken: set[str]) -> str:
        while True:
            made = "_".join(
                [first, *chance.sample(begins, chance.choice((0, 0, 0, 1))), chance.choice(last)]
            )
            if not any(made in each for each in taken):
                return made

    drafts = []
    for _ in range(number):
        output = name(chance.choice(begins), ends, outputs, ingredients)
        outputs.add(output)
        own = set()
        for _ in range(chance.choice((1, 1, 1, 1, 2, 3))):
            if chance.random() < 1 / 3:
                own.add(chance.choice(single))
            else:  # often of the same material, as planks are of a log
                material = (
                    output.partition("_")[0] if chance.random() < 1 / 2 else chance.choice(begins)
                )
                own.add(name(material, ingredient_ends, outputs))
        ingredients |= own
        drafts.append(
            Draft(
                output,
                chance.choice((1, 1, 1, 2, 3, 4, 6, 8, 16)),
                tuple((part, chance.randint(1, 9)) for part in sorted(own)),
            )
        )
    return drafts
