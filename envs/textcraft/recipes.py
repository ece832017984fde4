"""The recipes of a TextCraft world: read from a file or folder, freed of cycles, and everything
known about them before anyone plays.
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

from envs.textcraft.draft import Draft
from envs.textcraft.invented import MOST, invent

SHIPPED = Path(__file__).with_name("recipes.json")
NAMESPACE = "minecraft:"
INVENTED = "invented:"
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to craft `count` of `output`. Names are as a player writes them, with blanks."""

    output: str
    count: int
    ingredients: tuple[tuple[str, int], ...]  # items and kinds, as told
    text: str  # craft 4 stick using 2 planks

    def accepts(self, given: Mapping[str, int], members: Mapping[str, frozenset[str]]) -> bool:
        """True where `given`, items by name, is neither less nor more than this recipe takes."""
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
    """All recipes, in the order of their drafts.

    raw: what can be fetched. members: of every kind. depth: of items and kinds, 0 where nothing has
    to be crafted.
    goals: every craftable item, by depth and then by name.
    """

    def __init__(self, drafts: Iterable[Draft], source: str) -> None:
        self.source = source
        kept = _without_cycles([draft for draft in drafts if not _unpacks_block(draft)])
        self.recipes, self.members = _resolve(kept)
        if not self.recipes:
            raise ValueError(f"no crafting recipe in {source}")
        self._exact: dict[tuple[str, frozenset[tuple[str, int]]], Recipe] = {}
        self._loose: dict[str, list[Recipe]] = defaultdict(list)  # those with kinds
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
        self.digest = hashlib.sha256("\n".join(self._lines()).encode()).hexdigest()[:16]
        self._told: dict[str, tuple[list[str], list[str]]] = {}

    def told(self, goal: str) -> tuple[list[str], list[str]]:
        """(the recipes of the goal's tree, other uses of what is in it) as commands; a kind is
        followed to all of its members.
        """
        if goal not in self._told:
            seen = {goal}
            tree: list[Recipe] = []
            queue = [goal]
            for name in queue:  # grows
                own = self.by_output.get(name, [])
                tree += own
                for part in [
                    *sorted(self.members.get(name, ())),
                    *(part for recipe in own for part, _ in recipe.ingredients),
                ]:
                    if part not in seen:
                        seen.add(part)
                        queue.append(part)
            used = dict.fromkeys(part for recipe in tree for part, _ in recipe.ingredients)
            texts = dict.fromkeys(recipe.text for recipe in tree)
            others = dict.fromkeys(
                recipe.text
                for part in used
                for recipe in self._users[part]
                if recipe.text not in texts
            )
            self._told[goal] = [*texts], [*others]
        return self._told[goal]

    def find(self, output: str, given: Mapping[str, int]) -> Recipe | None:
        """The recipe that makes this from exactly that, items by name and how many of each."""
        recipe = self._exact.get((output, frozenset(given.items())))
        if recipe is None:
            recipe = next(
                (each for each in self._loose.get(output, ()) if each.accepts(given, self.members)),
                None,
            )
        return recipe

    def _measure(self) -> dict[str, int]:
        """The least number of crafting levels below each name: recipes by their deepest
        ingredient, items by their shallowest recipe.
        """
        depth = dict.fromkeys(self.raw, 0)
        changed = True
        while changed:
            changed = False
            for recipe in self.recipes:
                parts = [depth.get(name) for name, _ in recipe.ingredients]
                if None not in parts:
                    found = 1 + max(part for part in parts if part is not None)
                    if found < depth.get(recipe.output, found + 1):
                        depth[recipe.output] = found
                        changed = True
            for kind, members in self.members.items():
                known = [depth[member] for member in members if member in depth]
                if known and min(known) < depth.get(kind, min(known) + 1):
                    depth[kind] = min(known)
                    changed = True
        return depth

    def _lines(self) -> list[str]:
        kinds = [
            f"{kind}: {', '.join(sorted(members))}"
            for kind, members in sorted(self.members.items())
        ]
        return [*(recipe.text for recipe in self.recipes), *kinds]


@cache
def load_book(path: str = "") -> Book:
    """path: empty for the recipes that ship, a file of their form, or a folder of Minecraft's
    recipe files (AgentGym's `recipes/`); `invented:N` for those that ship and N made-up ones.

    A folder is read in the order of its files' names, whatever order the disk lists them in.
    Errors: ValueError in one line.
    """
    if path.startswith(INVENTED):
        return _with_invented(path.removeprefix(INVENTED))
    place = Path(path) if path else SHIPPED
    if place.is_dir():
        return Book(_read_folder(place), str(place))
    if not place.is_file():
        raise ValueError(f"textcraft option recipes: there is no file or folder {str(place)!r}")
    return Book(_read_file(place), str(place))


def plain(name: str) -> str:
    """`minecraft:oak_log` as a player writes it: `oak log`."""
    return name.removeprefix(NAMESPACE).replace("_", " ")


def item_id(name: str) -> str:
    """The inverse of `plain`."""
    name = name.replace(" ", "_")
    return name if ":" in name else NAMESPACE + name


def _with_invented(number: str) -> Book:
    if not _NUMBER.fullmatch(number) or int(number) > MOST:
        raise ValueError(
            f"textcraft option recipes: expected {INVENTED}N with N from 1 to {MOST}, got"
            f" {INVENTED + number!r}"
        )
    shipped = _read_file(SHIPPED)
    return Book(
        [*shipped, *invent(int(number), shipped)], f"{SHIPPED} and {number} invented recipes"
    )


def _read_file(path: Path) -> list[Draft]:
    """The form that `make_recipes` writes."""
    content = _json(path)
    try:
        kind_of = {member: kind for kind, members in content["kinds"].items() for member in members}
        return [
            Draft(
                str(output),
                int(count),
                tuple((str(name), int(n)) for name, n in ingredients.items()),
                kind_of.get(output, ""),
            )
            for output, count, ingredients in content["recipes"]
        ]
    except _MALFORMED as error:
        raise ValueError(
            f"textcraft option recipes: {path} is no recipe file ({type(error).__name__} {error})"
        ) from error


def _read_folder(folder: Path) -> list[Draft]:
    """Recipe files of this folder, or of `recipes` in it.
    Kinds of recipe other than crafting are passed over.
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
            names = [
                _ingredient(value)
                for key, value in content["key"].items()
                for _ in range(cells[key])
            ]
        case "crafting_shapeless":
            names = [_ingredient(value) for value in content["ingredients"]]
        case _:
            return None
    result = content["result"]
    if isinstance(result, str):
        result = {"item": result}
    output = _bare(result["item"] if "item" in result else result["id"])
    kind = content.get("group", "")
    return Draft(
        output,
        int(result.get("count") or 1),
        tuple(Counter(names).items()),
        "" if kind == output else kind,
    )


def _ingredient(value: Any) -> str:
    """Of alternatives the first; `#` marks a generic one, as newer files do themselves."""
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
    """Nine ingots from one block: the block is made of ingots, too."""
    return len(draft.ingredients) == 1 and draft.ingredients[0][0].endswith("_block")


def _without_cycles(drafts: Sequence[Draft]) -> list[Draft]:
    """Every recipe except those that would need, at some remove, what they make; of a cycle the
    last one read goes.
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
    found = set(names)
    queue = list(found)
    while queue:
        for name in below.get(queue.pop(), ()):
            if name not in found:
                found.add(name)
                queue.append(name)
    return found


def _resolve(drafts: Sequence[Draft]) -> tuple[list[Recipe], dict[str, frozenset[str]]]:
    """(recipes, members by kind).

    A kind of which no recipe makes a member is an item like any other.
    One named like an item has that as a member, too, and is told as `any sand`.
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
        output = plain(draft.output)
        parts = ", ".join(f"{n} {name}" for name, n in ingredients.items())
        recipe = Recipe(
            output,
            draft.count,
            tuple(ingredients.items()),
            f"craft {draft.count} {output} using {parts}",
        )
        recipes.setdefault((output, frozenset(ingredients.items())), recipe)
    return list(recipes.values()), {
        names[kind]: frozenset(map(plain, found)) for kind, found in sorted(by_kind.items())
    }


def _fits(items: Mapping[str, int], slots: Sequence[tuple[frozenset[str], int]]) -> bool:
    """Whether the items fill the slots, (who may enter, how many) each; both add up to the same
    number.

    They do where no set of slots is too small for the items that fit nowhere else (Hall's theorem).
    """
    for chosen in itertools.product((True, False), repeat=len(slots)):
        room = sum(n for (_, n), inside in zip(slots, chosen, strict=True) if inside)
        elsewhere = [
            members for (members, _), inside in zip(slots, chosen, strict=True) if not inside
        ]
        if (
            sum(n for name, n in items.items() if not any(name in members for members in elsewhere))
            > room
        ):
            return False
    return True
