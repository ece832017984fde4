"""Random draws for the generated content, and the word lists that it is made of. Draws are equal
on every machine and Python version: they use only `random.random()` of a named stream.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


class Dice:
    """A stream of random draws seeded by `key`; draws from other streams do not change it."""

    def __init__(self, *key: object) -> None:
        self._random = random.Random("/".join(map(str, key)))  # noqa: S311 (content, not secrets)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def between(self, low: int, high: int) -> int:
        """Draw a whole number from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, among: Sequence[T]) -> T:
        return among[int(self._random.random() * len(among))]

    def shuffled(self, among: Sequence[T]) -> list[T]:
        return sorted(among, key=lambda _: self._random.random())

    def some(self, among: Sequence[T], count: int) -> list[T]:
        """Draw `count` items without replacement, or all if there are fewer, in random order."""
        return self.shuffled(among)[:count]

    def skewed(self, high: int, power: float = 3.0) -> int:
        """Draw a whole number from 0 to `high`; the larger `power`, the likelier small numbers."""
        return int(self._random.random() ** power * (high + 1))


def load_words(module: str) -> Any:
    """Load words.json from the folder of a module: a namespace with an attribute for each list.

    module: path of the module's file. Lists become tuples, so that records can share them.
    """
    words = json.loads(Path(module).with_name("words.json").read_text(encoding="utf-8"))
    return SimpleNamespace(**_frozen(words))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(entry) for entry in value)
    return (
        {key: _frozen(entry) for key, entry in value.items()} if isinstance(value, dict) else value
    )
