"""A planner that crafts any goal: it chooses recipes, members of kinds, amounts and the order of
actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from envs.textcraft.recipes import Book, Recipe


@dataclass(slots=True)
class Choices:
    """The chosen recipe of each item and the chosen member of each kind. The default is the one
    that needs the fewest levels of crafting.
    """

    book: Book
    recipes: dict[str, Recipe] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)

    def recipe(self, item: str) -> Recipe:
        return self.recipes.get(item) or min(self.book.by_output[item], key=self._depth_below)

    def item(self, name: str) -> str:
        """Return the item to use for an ingredient: itself, or the chosen member of a kind."""
        if name not in self.book.members:
            return name
        return self.members.get(name) or min(
            self.book.members[name], key=lambda member: (self.book.depth[member], member)
        )

    def others(self, item: str) -> Iterator[Choices]:
        """Yield choices with each recipe of the item, and with each member of a kind in it."""
        for recipe in self.book.by_output.get(item, ()):
            recipes = {**self.recipes, item: recipe}
            yield Choices(self.book, recipes, self.members)
            for kind, _ in recipe.ingredients:
                for member in sorted(self.book.members.get(kind, ())):
                    yield Choices(self.book, recipes, {**self.members, kind: member})

    def _depth_below(self, recipe: Recipe) -> int:
        return max(self.book.depth[name] for name, _ in recipe.ingredients)


@dataclass(slots=True)
class Act:
    """One action: it uses up `takes` (empty for a get) and adds n of `item` to the inventory."""

    takes: dict[str, int]
    item: str
    n: int

    @property
    def text(self) -> str:
        if not self.takes:
            return f"get {self.n} {self.item}"
        takes = ", ".join(f"{n} {name}" for name, n in self.takes.items())
        return f"craft {self.n} {self.item} using {takes}"

    def after(self, inventory: Mapping[str, int]) -> dict[str, int]:
        left = Counter(inventory)
        left.subtract(self.takes)
        left[self.item] += self.n
        return {name: n for name, n in left.items() if n}


@dataclass(frozen=True, slots=True)
class Need:
    """A node of the goal's tree: an ingredient and its amount. `Plan.needs` lists parents first."""

    level: int  # 0 for the goal
    name: str  # item or kind, as in the parent's recipe
    item: str
    n: int
    held: int  # of n, from the inventory or a recipe's surplus
    recipe: Recipe | None  # makes the missing items; None if nothing has to be crafted


class Plan:
    """Actions that lead from an inventory to the goal under the given choices, ingredients before
    the items made of them.

    Equal items are fetched in one act, and a recipe's surplus is used by the next one that needs
    it.
    """

    def __init__(self, goal: str, inventory: Mapping[str, int], choices: Choices) -> None:
        self.choices = choices
        self.acts: list[Act] = []
        self.needs: list[Need] = []
        self._stock = dict(inventory)  # minus the reserved items
        self._gets: dict[str, Act] = {}
        self._provide(goal, 1, 0)

    def _provide(self, name: str, n: int, level: int) -> None:
        """Reserve n of an item or kind, add a Need, and add acts that make the missing ones."""
        item = self.choices.item(name)
        in_stock = min(n, self._stock.get(item, 0))
        short = n - in_stock
        self._stock[item] = self._stock.get(item, 0) - in_stock
        craftable = short > 0 and item in self.choices.book.by_output
        recipe = self.choices.recipe(item) if craftable else None
        self.needs.append(Need(level, name, item, n, in_stock, recipe))
        if recipe is not None:
            times = -(-short // recipe.count)
            takes: Counter[str] = Counter()
            for part, count in recipe.ingredients:
                self._provide(part, count * times, level + 1)
                takes[self.choices.item(part)] += count
            self.acts += [Act(dict(takes), item, recipe.count)] * times
            self._stock[item] += times * recipe.count - short
        elif short:
            if item not in self._gets:
                self._gets[item] = Act({}, item, 0)
                self.acts.append(self._gets[item])
            self._gets[item].n += short


def shortest(goal: str, inventory: Mapping[str, int], choices: Choices) -> Plan:
    """Return a plan that no other choice for one of its items shortens (local search); it is never
    longer than the plan under the given choices.
    """
    best = Plan(goal, inventory, choices)
    improved = True
    while improved:
        improved = False
        for item in dict.fromkeys(need.item for need in best.needs):
            for other in best.choices.others(item):
                plan = Plan(goal, inventory, other)
                if len(plan.acts) < len(best.acts):
                    best, improved = plan, True
    return best


class Planner:
    """The expert of one episode.
    While the inventory does not change it returns the same action; after other actions than its
    own it makes a new plan.
    """

    def __init__(self, book: Book, goal: str, inventory: dict[str, int]) -> None:
        self._goal = goal
        self._inventory = inventory  # the world's object, which steps change
        self._choices = Choices(book)
        self._ahead: Sequence[Act] = ()
        self._before: dict[str, int] = {}  # the inventory before the first act of _ahead

    def next_action(self) -> str:
        if self._ahead and self._inventory == self._ahead[0].after(self._before):
            self._before, self._ahead = dict(self._inventory), self._ahead[1:]
        elif not self._ahead or self._inventory != self._before:
            plan = shortest(self._goal, self._inventory, self._choices)
            self._choices, self._ahead = plan.choices, plan.acts
            self._before = dict(self._inventory)
        return self._ahead[0].text


def tree_lines(book: Book, goal: str, inventory: Mapping[str, int]) -> list[str]:
    """Return the tree of the shortest plan, one line per ingredient: the amount, the amount in the
    inventory, and how to get the rest.
    """
    lines = []
    for need in shortest(goal, inventory, Choices(book)).needs:
        kind = f" (any {need.name})" if need.name != need.item else ""
        missing = need.n - need.held
        get = f"get {missing} {need.item}" if missing else "held"
        how = need.recipe.text if missing and need.recipe else get
        share = f", {need.held} held" if missing and need.held else ""
        lines.append(f"{'  ' * need.level}{need.n} {need.item}{kind}{share}: {how}")
    return lines
