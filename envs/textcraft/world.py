"""One TextCraft episode behind the `Simulator` protocol: a goal, a list of crafting commands
and an inventory.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from envs.env import Expert, StepResult
from envs.textcraft.planner import Planner, tree_lines
from envs.textcraft.recipes import Book, item_id
from envs.wire import FAMILY, INVALID

LONGEST = 1000  # characters of an action; nine ingredients need less than half
ECHO_CHARS = 200  # of an invalid action, repeated in the answer
EMPTY = "You are not carrying anything."
Protocol = Literal["own", "agentgym"]
GRAMMAR = (
    "get <number> <item> | craft <number> <item> using <number> <item>, <number> <item> | inventory"
)

_ACTION = re.compile(
    r"get (?P<n>[1-9][0-9]{0,5}) (?P<item>.+)|craft (?:[0-9]{1,6} )?(?P<output>.+?) using"
    r" (?P<given>.+)|(?P<look>inventory.*)"
)
_PART = re.compile(r"([1-9][0-9]{0,5}) (.+)")


@dataclass(frozen=True, slots=True)
class Options:
    """The goals, and how observations present them."""

    goals: tuple[str, ...]
    distractors: int  # maximum number of commands that do not lead to the goal
    max_steps: int  # 0: no limit
    # own: the answer to a malformed action ends with the grammar; agentgym: AgentGym's answer only
    protocol: Protocol = "own"


class Refused(Exception):
    """An action was refused and changed nothing; the message is the observation."""


class Malformed(Refused):
    """An action outside the grammar."""


class World:
    """One episode at a time. Its randomness comes from the task id alone; worlds share the book."""

    def __init__(self, book: Book, options: Options) -> None:
        self.book = book
        self.options = options
        self.goal = ""
        self.family = ""
        self.inventory: dict[str, int] = {}  # in the order of first acquisition
        self.num_steps = 0  # of this episode
        self._ended = False

    def reset(self, task_id: int) -> str:
        self.goal = self.options.goals[task_id % len(self.options.goals)]
        self.family = f"depth {self.book.depth[self.goal]}"
        self.inventory, self.num_steps, self._ended = {}, 0, False
        # Random hashes a str with sha512, so the draws are the same on every machine
        chance = random.Random(f"textcraft {task_id}")  # noqa: S311
        tree, others = self.book.told(self.goal)
        commands = tree + chance.sample(others, min(self.options.distractors, len(others)))
        chance.shuffle(commands)
        return "Crafting commands:\n" + "\n".join(commands) + f"\n\nGoal: craft {self.goal}."

    def step(self, action: str) -> StepResult:
        assert not self._ended, "the episode is over"
        self.num_steps += 1
        info: dict[str, Any] = {FAMILY: self.family}
        try:
            observation, success = self._act(action)
        except Refused as refused:
            observation, success = str(refused), False
            if isinstance(refused, Malformed) and self.options.protocol == "own":
                observation += f"\nExpected: {GRAMMAR}"
            info[INVALID] = True
        truncated = not success and self.num_steps == self.options.max_steps
        self._ended = success or truncated
        return StepResult(observation, 1.0 if success else 0.0, success, truncated, success, info)

    def render(self) -> tuple[str, bytes]:
        title = f"Goal: {self.goal} ({self.family}), {self.num_steps} steps taken"
        lines = [title, self._look(), "", *tree_lines(self.book, self.goal, self.inventory)]
        return "text/plain", "\n".join(lines).encode()

    def expert(self) -> Expert:
        return Planner(self.book, self.goal, self.inventory)

    def hints(self) -> list[str]:
        """Return `inventory`, the craft actions possible now, and `get 1` of every raw item."""
        crafts = []
        for recipe in self.book.recipes:
            parts = [self._held(name, n) for name, n in recipe.ingredients]
            if all(parts):
                crafts.append(f"craft {recipe.count} {recipe.output} using {', '.join(parts)}")
        return ["inventory", *crafts, *(f"get 1 {item}" for item in sorted(self.book.raw))]

    def close(self) -> None: ...

    def _held(self, name: str, n: int) -> str:
        """Return `n item` for an item, or for one member of a kind, that the inventory has n of;
        else empty.
        """
        members = sorted(self.book.members.get(name, {name}))
        item = next((item for item in members if self.inventory.get(item, 0) >= n), "")
        return item and f"{n} {item}"

    def _act(self, action: str) -> tuple[str, bool]:
        """Carry out an action. Return (observation, True if it crafted the goal). Errors: Refused,
        with the inventory unchanged.
        """
        if len(action) > LONGEST:
            raise Malformed(_unreadable(action))
        text = normalise(action)
        match = _ACTION.fullmatch(text)
        if match is None:
            raise Malformed(_unreadable(text))
        n, item, output, listed, _ = match.groups()
        if item is not None:
            return self._get(int(n), item), False
        if output is not None:
            return self._craft(output, listed)
        return self._look(), False

    def _get(self, n: int, item: str) -> str:
        if item not in self.book.raw:
            raise Refused(f"Could not find {_short(item)}")
        self.inventory[item] = self.inventory.get(item, 0) + n
        return f"Got {n} {item}"

    def _craft(self, output: str, listed: str) -> tuple[str, bool]:
        items: dict[str, int] = {}
        for part in listed.split(","):
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise Malformed(f"Wrong item format: {_short(part.strip())}")
            items[match[2]] = items.get(match[2], 0) + int(match[1])
        if any(self.inventory.get(name, 0) < n for name, n in items.items()):
            raise Refused(f"Could not find enough items to craft {_short(item_id(output))}")
        recipe = self.book.find(output, items)
        if recipe is None:
            raise Refused(f"Could not find a valid recipe for {_short(f'{output} using {listed}')}")
        for name, n in items.items():
            self.inventory[name] -= n
            if not self.inventory[name]:
                del self.inventory[name]
        self.inventory[output] = self.inventory.get(output, 0) + recipe.count
        return f"Crafted {recipe.count} {item_id(output)}", output == self.goal

    def _look(self) -> str:
        items = " ".join(f"[{name}] ({n})" for name, n in self.inventory.items())
        return f"Inventory: {items or EMPTY}"


def normalise(text: str) -> str:
    """Return the text in lower case with single blanks, also in place of underscores, and without
    `minecraft:` and final periods.
    """
    return " ".join(text.lower().replace("minecraft:", "").replace("_", " ").split()).rstrip(". ")


def _unreadable(text: str) -> str:
    failed = "extract recipe from" if text.startswith("craft ") else "execute"
    return f"Could not {failed} {_short(text)}"


def _short(text: str) -> str:
    return text if len(text) <= ECHO_CHARS else text[:ECHO_CHARS] + "..."
