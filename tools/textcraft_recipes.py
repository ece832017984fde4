"""Script that makes `recipes.json`, the shipped recipes, from the crafting recipes of Minecraft in
the PyPI package `minecraft-data`.

Only this script needs the package, no server does: `pip install minecraft-data==3.20.0`, then
`python -m tools.textcraft_recipes`.
The package lists a recipe once for every combination of concrete ingredients; this script merges
recipes that differ in one ingredient only:

- the variants of an ingredient form a family if they occur in recipes of several items, or are four
  or more, or are part of such a family;
- a family whose members can all be crafted and share the last word of their names becomes a generic
  ingredient, for example `#planks`;
- any other family that has members without a recipe is replaced by the one of these that most
  recipes use, for example `oak_log` or `coal`;
- other variants stay separate recipes, for example a dye made of different flowers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Cells = tuple[str, ...]  # the item in every used cell of the crafting grid, row by row
# the alternatives for each different ingredient, in order of appearance
Slots = tuple[frozenset[str], ...]

VERSION = "1.16.2"
MANY = 4
NAMES = {"slab": "wooden_slab"}  # `slab` alone would include stone slabs
TARGET = Path(__file__).resolve().parents[1] / "envs/textcraft/recipes.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the recipe file that ships.")
    parser.add_argument("--version", default=VERSION, help="of Minecraft (default: %(default)s)")
    parser.add_argument("--target", type=Path, default=TARGET, help="(default: the shipped file)")
    arguments = parser.parse_args()
    try:
        minecraft_data: Any = importlib.import_module("minecraft_data")
    except ImportError:
        needed = "this script needs the package minecraft-data"
        print(f"{needed}: pip install minecraft-data==3.20.0", file=sys.stderr)
        return 2
    game = minecraft_data(arguments.version)
    names = {item["id"]: item["name"] for item in game.items_list}
    kinds, recipes = condense(read(game.recipes, names))
    package = f"PyPI minecraft-data {importlib.metadata.version('minecraft-data')}"
    source = f"Minecraft {arguments.version}, {package}"
    arguments.target.write_text(dump(source, kinds, recipes), encoding="utf-8")
    print(f"{arguments.target}: {len(recipes)} recipes, generic ingredients: {', '.join(kinds)}")
    return 0


def read(
    recipes: dict[str, list[dict[str, Any]]], names: dict[int, str]
) -> Iterator[tuple[str, int, str, Cells]]:
    """Yield (output, count, shape, cells) of every listed recipe. Recipes of equal shape fill the
    same cells with the same pattern of ingredients.
    """
    for variants in recipes.values():
        for variant in variants:
            rows = variant.get("inShape") or [variant["ingredients"]]
            cells = tuple(names[cell] for row in rows for cell in row if cell is not None)
            order = list(dict.fromkeys(cells))
            shape = [
                "/".join(
                    "".join("." if cell is None else str(order.index(names[cell])) for cell in row)
                    for row in rows
                )
            ]
            if "inShape" not in variant:
                shape = ["any order", *shape]
            yield names[variant["result"]["id"]], variant["result"]["count"], " ".join(shape), cells


def condense(
    listed: Iterable[tuple[str, int, str, Cells]],
) -> tuple[dict[str, list[str]], list[tuple[str, int, dict[str, int]]]]:
    """Merge the variants of recipes.

    Result: ({generic ingredient: its members}, [(output, count, {ingredient: count})]), both in
    alphabetical order.
    """
    variants: dict[tuple[str, int, str], list[Cells]] = defaultdict(list)
    for output, count, shape, cells in listed:
        variants[output, count, shape].append(cells)
    slots = {key: factor(grids) for key, grids in variants.items()}
    makes: dict[frozenset[str], set[str]] = defaultdict(set)
    for (output, _, _), factored in slots.items():
        for family in factored:
            makes[family].add(output)
    several = {family: outputs for family, outputs in makes.items() if len(family) > 1}
    families = [f for f, outputs in several.items() if len(outputs) > 1 or len(f) >= MANY]
    popularity = Counter(
        member for family, outputs in makes.items() for member in family for _ in outputs
    )
    crafted = {key[0] for key, grids in variants.items() if not all(map(unpacks, grids))}
    kinds: dict[str, list[str]] = {}
    result: set[tuple[str, int, tuple[tuple[str, int], ...]]] = set()
    for (output, count, shape), factored in slots.items():
        choices = [
            ingredients_for(family, families, crafted, popularity, kinds) for family in factored
        ]
        pattern = [int(cell) for cell in shape.split()[-1] if cell.isdigit()]
        for choice in itertools.product(*choices):
            counts = {name: sum(choice[cell] == name for cell in pattern) for name in choice}
            result.add((output, count, tuple(sorted(counts.items()))))
    recipes = [(output, count, dict(ingredients)) for output, count, ingredients in sorted(result)]
    return dict(sorted(kinds.items())), recipes


def factor(variants: list[Cells]) -> Slots:
    """Return the ingredients' alternatives. Errors: ValueError if a combination is missing."""
    distinct = {tuple(dict.fromkeys(cells)) for cells in variants}
    slots = tuple(frozenset(column) for column in zip(*distinct, strict=True))
    if math.prod(map(len, slots)) != len(distinct):
        raise ValueError(f"variants of one recipe are no product of families: {sorted(distinct)}")
    return slots


def ingredients_for(
    family: frozenset[str],
    families: list[frozenset[str]],
    crafted: set[str],
    popularity: Counter[str],
    kinds: dict[str, list[str]],
) -> list[str]:
    """Return the ingredient names that replace a family: one name, or several names that each give
    a separate recipe.
    Generic ingredients are added to `kinds`.
    """
    smaller = [known for known in families if known < family and generic_name(known, crafted)]
    # a generic ingredient plus other items: sticks are made of planks or bamboo
    if smaller:
        inside = max(smaller, key=len)
        generic = ingredients_for(inside, families, crafted, popularity, kinds)
        return [*generic, *sorted(family - inside)]
    if len(family) > 1 and any(family <= known for known in families):
        if name := generic_name(family, crafted):
            kinds[name] = sorted(family)
            return [f"#{name}"]
        if raw := family - crafted:
            return [min(raw, key=lambda member: (-popularity[member], len(member), member))]
    return sorted(family)


def generic_name(family: frozenset[str], crafted: set[str]) -> str:
    """Return the members' common last word, or its entry in NAMES; empty if their last words differ
    or a member cannot be crafted.
    """
    words = {member.rpartition("_")[2] for member in family}
    if len(words) > 1 or not family <= crafted:
        return ""
    word = words.pop()
    return NAMES.get(word, word)


def unpacks(cells: Cells) -> bool:
    """Return True for recipes like nine ingots from one block, which servers do not offer."""
    return len(set(cells)) == 1 and cells[0].endswith("_block")


def dump(
    source: str, kinds: dict[str, list[str]], recipes: list[tuple[str, int, dict[str, int]]]
) -> str:
    """Return the JSON text, one line per recipe so that diffs are readable."""
    kind_lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in kinds.items())
    recipe_lines = ",\n".join(f"  {json.dumps(recipe)}" for recipe in recipes)
    return (
        f'{{\n "source": {json.dumps(source)},\n "kinds": {{\n{kind_lines}\n }},\n "recipes":'
        f" [\n{recipe_lines}\n ]\n}}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
