"""The recipes of a TextCraft world: read from a file or folder, without cycles, and indexed before
play.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envs.textcraft.invented import MOST, Draft, invent

SHIPPED = Path(__file__).with_name("recipes.json")
NAMESPACE = "minecraft:"
INVENTED = "invented:"
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to craft `count` of `output`. Names have blanks, as a player writes them."""

    output: str
    count: int
    ingredients: tuple[tuple[str, int], ...]  # items and kinds, named as in commands
    text: str  # craft 4 stick using 2 planks

    def accepts(self, given: Mapping[str, int], members: Mapping[str, frozenset[str]]) -> bool:
        """Return True if `given`, count by item, is exactly what this recipe takes.
        members: the items of each kind.
        """
        left = dict(given)
        slots = []
        for name, n in self.ingredients:
            if name in members:
                slots.append((members[name], n))
            elif left.get(name, 0) < n:
                return False
            elif left[name] == n:
                del left[name]
            else:
                left[name] -= n
        return sum(left.values()) == sum(n for _, n in slots) and _fits(left, slots)


class Book:
    """Recipes in the order of their drafts, without cycles and recipes that unpack a block.

    raw: items that can be fetched. members: items of each kind.
    depth: of items and kinds, 0 if nothing has to be crafted.
    goals: every craftable item, by depth and then by name. digest: of recipes and kinds.
    source: name of the drafts' origin. Errors: ValueError if no recipe is left.
    """

    def __init__(self, drafts: Iterable[Draft], source: str) -> None:
        self.source = source
        kept = _without_cycles([draft for draft in drafts if not _unpacks_block(draft)])
        self.recipes, self.members = _resolve(kept)
        if not self.recipes:
            raise ValueError(f"no crafting recipe in {source}")
        self._exact: dict[tuple[str, frozenset[tuple[str, int]]], Recipe] = {}
        self._loose: dict[str, list[Recipe]] = defaultdict(list)  # recipes with kinds
        self.by_output: dict[str, list[Recipe]] = defaultdict(list)
        users: dict[str, list[Recipe]] = defaultdict(list)
        for recipe in self.recipes:
            self.by_output[recipe.output].append(recipe)
            if any(name in self.members for name, _ in recipe.ingredients):
                self._loose[recipe.output].append(recipe)
            else:
                self._exact[recipe.output, frozenset(recipe.ingredients)] = recipe
            for name, _ in recipe.ingredients:
                users[name].append(recipe)
        self.by_output = dict(self.by_output)
        self._users = dict(users)
        self.raw = frozenset(
            name for name in users if name not in self.by_output and name not in self.members
        )
        self.depth = self._measure()
        self.goals = sorted(self.by_output, key=lambda name: (self.depth[name], name))
        kinds = [
            f"{kind}: {', '.join(sorted(self.members[kind]))}" for kind in sorted(self.members)
        ]
        lines = [*(recipe.text for recipe in self.recipes), *kinds]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        self._told: dict[str, tuple[list[str], list[str]]] = {}

    def told(self, goal: str) -> tuple[list[str], list[str]]:
        """Return (commands of the goal's tree, commands of other recipes that use its ingredients).
        The tree contains all members of a kind.
        """
        if goal not in self._told:
            tree: list[Recipe] = []
            queue = [goal]
            for name in queue:  # the loop appends to it
                recipes = self.by_output.get(name, [])
                tree += recipes
                parts = sorted(self.members.get(name, ()))
                parts += [part for recipe in recipes for part, _ in recipe.ingredients]
                queue += dict.fromkeys(part for part in parts if part not in queue)
            used = dict.fromkeys(part for recipe in tree for part, _ in recipe.ingredients)
            texts = dict.fromkeys(recipe.text for recipe in tree)
            others = dict.fromkeys(recipe.text for part in used for recipe in self._users[part])
            self._told[goal] = [*texts], [text for text in others if text not in texts]
        return self._told[goal]

    def find(self, output: str, given: Mapping[str, int]) -> Recipe | None:
        """Return the recipe that makes `output` from exactly `given` (count by item), or None."""
        loose = (one for one in self._loose.get(output, ()) if one.accepts(given, self.members))
        return self._exact.get((output, frozenset(given.items()))) or next(loose, None)

    def _measure(self) -> dict[str, int]:
        """Return the least number of crafting levels below each name: a recipe counts by its
        deepest ingredient, an item by its shallowest recipe.
        """
        depth = dict.fromkeys(self.raw, 0)
        changed = True
        while changed:
            changed = False
            for recipe in self.recipes:
                parts = [depth.get(name) for name, _ in recipe.ingredients]
                if None not in parts:
                    level = 1 + max(part for part in parts if part is not None)
                    if level < depth.get(recipe.output, level + 1):
                        depth[recipe.output] = level
                        changed = True
            for kind, members in self.members.items():
                known = [depth[member] for member in members if member in depth]
                if known and min(known) < depth.get(kind, min(known) + 1):
                    depth[kind] = min(known)
                    changed = True
        return depth


@cache
def load_book(path: str = "") -> Book:
    """Read a book, once per path.

    path: empty for the shipped recipes, a file of the same form, or a folder of Minecraft's recipe
    files (AgentGym's `recipes/`); `invented:N` for the shipped recipes and N invented ones.
    The files of a folder are read in the order of their names.
    Errors: ValueError in one line.
    """
    if path.startswith(INVENTED):
        return _with_invented(path.removeprefix(INVENTED))
    source = Path(path) if path else SHIPPED
    if source.is_dir():
        return Book(_read_folder(source), str(source))
    if not source.is_file():
        raise ValueError(f"textcraft option recipes: there is no file or folder {str(source)!r}")
    return Book(_read_file(source), str(source))


def plain(name: str) -> str:
    """Return an item's name as a player writes it: `oak log` for `minecraft:oak_log`."""
    return name.removeprefix(NAMESPACE).replace("_", " ")


def item_id(name: str) -> str:
    """Return an item's id, the inverse of `plain`."""
    name = name.replace(" ", "_")
    return name if ":" in name else NAMESPACE + name


def _with_invented(number: str) -> Book:
    if not _NUMBER.fullmatch(number) or int(number) > MOST:
        raise ValueError(
            f"textcraft option recipes: expected {INVENTED}N with N from 1 to {MOST}, got"
            f" {INVENTED + number!r}"
        )
    shipped = _read_file(SHIPPED)
    source = f"{SHIPPED} and {number} invented recipes"
    return Book([*shipped, *invent(int(number), shipped)], source)


def _read_file(path: Path) -> list[Draft]:
    """Read a file in the form that `tools/textcraft_recipes.py` writes. Errors: ValueError."""
    content = _json(path)
    try:
        kind_of = {member: kind for kind, members in content["kinds"].items() for member in members}
        drafts = []
        for output, count, ingredients in content["recipes"]:
            parts = tuple((str(name), int(n)) for name, n in ingredients.items())
            drafts.append(Draft(str(output), int(count), parts, kind_of.get(output, "")))
        return drafts
    except _MALFORMED as error:
        raise ValueError(
            f"textcraft option recipes: {path} is no recipe file ({type(error).__name__} {error})"
        ) from error


def _read_folder(folder: Path) -> list[Draft]:
    """Read the recipe files of a folder, or of its subfolder `recipes` if there is one.
    Recipes other than crafting are skipped. Errors: ValueError naming the file.
    """
    inner = folder / "recipes"
    files = sorted((inner if inner.is_dir() else folder).glob("*.json"), key=lambda file: file.name)
    drafts = []
    for file in files:
        content = _json(file)
        try:
            draft = _draft(content)
        except _MALFORMED as error:
            raise ValueError(
                f"textcraft option recipes: {file} is no recipe ({type(error).__name__} {error})"
            ) from error
        if draft is not None:
            drafts.append(draft)
    return drafts


def _draft(content: Any) -> Draft | None:
    match content["type"].removeprefix(NAMESPACE):
        case "crafting_shaped":
            cells = Counter("".join(content["pattern"]))
            keys = content["key"].items()
            names = [_ingredient(value) for key, value in keys for _ in range(cells[key])]
        case "crafting_shapeless":
            names = [_ingredient(value) for value in content["ingredients"]]
        case _:
            return None
    result = content["result"]
    if isinstance(result, str):
        result = {"item": result}
    output = _bare(result["item"] if "item" in result else result["id"])
    kind, count = content.get("group", ""), int(result.get("count") or 1)
    return Draft(output, count, tuple(Counter(names).items()), "" if kind == output else kind)


def _ingredient(value: Any) -> str:
    """Return an ingredient's name: the first of several alternatives; `#` marks a generic one, as
    in newer files.
    """
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, str):
        return "#" + _bare(value[1:]) if value.startswith("#") else _bare(value)
    return _bare(value["item"]) if "item" in value else "#" + _bare(value["tag"])


def _bare(name: str) -> str:
    return name.removeprefix(NAMESPACE)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"textcraft option recipes: cannot read {path}: {error}") from error


def _unpacks_block(draft: Draft) -> bool:
    """Return True for recipes like nine ingots from one block: the block is made of ingots, a
    cycle.
    """
    return len(draft.ingredients) == 1 and draft.ingredients[0][0].endswith("_block")


def _without_cycles(drafts: Sequence[Draft]) -> list[Draft]:
    """Return the recipes without those that need their own output, directly or indirectly. From a
    cycle the recipe read last is removed.
    """
    below: dict[str, set[str]] = defaultdict(set)
    for draft in drafts:
        if draft.kind:
            below["#" + draft.kind].update((draft.output, draft.kind))
    kept = []
    for draft in drafts:
        parts = [name for name, _ in draft.ingredients]
        if draft.output not in _reachable(parts, below):
            below[draft.output].update(parts)
            kept.append(draft)
    return kept


def _reachable(names: Iterable[str], below: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = set(names)
    while ahead:
        reached |= ahead
        ahead = {part for name in ahead for part in below.get(name, ())} - reached
    return reached


def _resolve(drafts: Sequence[Draft]) -> tuple[list[Recipe], dict[str, frozenset[str]]]:
    """Return (recipes, members by kind), without recipes that have no ingredients or come twice.

    A kind without a craftable member is an item like any other.
    A kind named like an item has this item as a member, too, and commands name it `any sand`.
    """
    used = {name for draft in drafts for name, _ in draft.ingredients if name.startswith("#")}
    items: set[str] = set()
    for draft in drafts:
        items.update({draft.output, *(part for part, _ in draft.ingredients)} - used)
    by_kind: dict[str, set[str]] = defaultdict(set)
    for draft in drafts:
        if f"#{draft.kind}" in used:
            by_kind[f"#{draft.kind}"].update({draft.output, draft.kind} & items)
    names = {kind: plain(kind[1:]) for kind in used}
    names |= {kind: f"any {plain(kind[1:])}" for kind in by_kind if kind[1:] in items}

    recipes: dict[tuple[str, frozenset[tuple[str, int]]], Recipe] = {}
    for draft in drafts:
        ingredients: Counter[str] = Counter()
        for part, n in draft.ingredients:
            ingredients[names.get(part) or plain(part)] += n
        if not ingredients:
            continue
        output, parts = plain(draft.output), tuple(ingredients.items())
        text = f"craft {draft.count} {output} using {', '.join(f'{n} {name}' for name, n in parts)}"
        recipe = Recipe(output, draft.count, parts, text)
        recipes.setdefault((output, frozenset(parts)), recipe)
    return list(recipes.values()), {
        names[kind]: frozenset(map(plain, members)) for kind, members in sorted(by_kind.items())
    }


def _fits(items: Mapping[str, int], slots: Sequence[tuple[frozenset[str], int]]) -> bool:
    """Return True if the items fill the slots; both add up to the same number.

    slots: (names that fit, count) of each.
    The items fit if no set of slots is too small for the items that fit only there (Hall's
    theorem).
    """
    for chosen in itertools.product((True, False), repeat=len(slots)):
        room = sum(n for (_, n), inside in zip(slots, chosen, strict=True) if inside)
        outside = (kind for (kind, _), inside in zip(slots, chosen, strict=True) if not inside)
        elsewhere = frozenset[str]().union(*outside)
        if sum(n for name, n in items.items() if name not in elsewhere) > room:
            return False
    return True
