"""The texts about the world: sentences of a passage, questions about its facts, and search queries.
The templates are in words.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.searchqa_corpus.lore import WORDS, Dice, Entity


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that a question can be about, see words.yaml."""

    kind: str
    fact: str
    words: str
    asks: Sequence[str]
    bridge: str = ""


RELATIONS = tuple(
    Relation(kind, **row) for kind, rows in WORDS["relations"].items() for row in rows
)
_OBJECTS = {"she": "her", "he": "him"}


def passage(entity: Entity, dice: Dice) -> str:
    """Return an entity's passage, of three to seven sentences."""
    groups = WORDS["passages"][entity.kind]
    sentences = [_one_of(groups[0], entity, dice)]
    sentences += [_one_of(group, entity, dice) for group in dice.shuffled(groups[1:])]
    return " ".join(text for text in sentences if text)


def phrase(entity: Entity) -> str:
    """Return an entity's name in a question: `the opera The Copper Lantern`."""
    return _fill(WORDS["phrases"].get(entity.kind, "{x}"), entity)


def ask(relation: Relation, entity: Entity, subject: str, dice: Dice) -> str:
    """Return a random question for the fact, with `subject` as the entity's name."""
    return _fill(dice.pick(relation.asks), entity, subject)


def bridge(relation: Relation, entity: Entity) -> str:
    """Return a phrase for the fact's value: `the composer of the opera The Copper Lantern`."""
    return _fill(relation.bridge, entity, phrase(entity))


def query(relation: Relation, entity: Entity) -> str:
    """Return a search query: the name and a few words."""
    return f"{entity.name} {_fill(relation.words, entity)}"


def answers(value: Entity | int | str) -> list[str]:
    """Return the forms of a value that count as right, the longest first."""
    if not isinstance(value, Entity):
        return [str(value)]
    short = {"river": "River ", "lake": "Lake ", "mountain": "Mount "}.get(value.kind)
    return [value.name, value.name.removeprefix(short)] if short else [value.name]


def _one_of(sentences: Sequence[str], entity: Entity, dice: Dice) -> str:
    """Return a random one of the sentences, filled in; empty if it needs an unknown fact."""
    try:
        return _fill(dice.pick(sentences), entity)
    except KeyError:
        return ""


def _fill(template: str, entity: Entity, x: str = "") -> str:
    words = {
        name: value.name if isinstance(value, Entity) else str(value)
        for name, value in entity.facts.items()
    }
    words["x"] = x or entity.name
    if entity.kind == "work":
        form = words["form"]
        words |= {**WORDS["forms"][form], "a_form": _with_article(form)}
    if entity.kind == "building":
        words["what_low"] = words["what"].lower()
    if entity.kind == "person":
        low = words["pronoun"]
        words |= {"pronoun": low.title(), "pronoun_low": low, "pronoun_object": _OBJECTS[low]}
        words["a_profession"] = _with_article(words["profession"])
    return template.format_map(words)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
