"""Made-up recipes of the words of known ones: as many goals of one level of crafting as anybody wants to learn from.

The game has 124 such goals. Whoever learns from 84 of them learns them by heart; of thousands only how to read a recipe helps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from envs.textcraft.draft import Draft

MOST = 20_000
SHORTEST_WORD = 3  # no `on` and `a` of "carrot on a stick"


def invent(number: int, known: Iterable[Draft]) -> list[Draft]:
    """That many recipes. No item of theirs is in a known recipe or made by two; their ingredients can all be fetched.

    Equal on every machine, and the first n of any number are the same n.
    """
    names = sorted({name.removeprefix("#") for draft in known for name in (draft.output, *(part for part, _ in draft.ingredients))})
    parts = [name.split("_") for name in names]
    ends = sorted({words[-1] for words in parts})
    begins = sorted({word for words in parts for word in words[:-1] if len(word) >= SHORTEST_WORD})
    chance = random.Random("invented recipes")  # noqa: S311  (a str is hashed by sha512, the same everywhere)
    outputs, ingredients = set(names), set(names)

    def name(*taken: set[str]) -> str:
        while True:
            made = "_".join([*chance.sample(begins, chance.choice((1, 1, 1, 2))), chance.choice(ends)])
            if not made.endswith("_block") and not any(made in each for each in taken):
                return made

    drafts = []
    for _ in range(number):
        output = name(outputs, ingredients)
        outputs.add(output)
        own = [name(outputs) for _ in range(chance.choice((1, 1, 1, 2, 2, 3)))]
        ingredients.update(own)
        drafts.append(Draft(output, chance.choice((1, 1, 2, 3, 4, 6)), tuple((part, chance.randint(1, 8)) for part in dict.fromkeys(own))))
    return drafts
