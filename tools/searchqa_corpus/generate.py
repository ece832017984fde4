"""Script that writes the embedded corpus: `python -m tools.searchqa_corpus.generate`.
Its output is equal on every machine and Python version.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.searchqa_corpus import tell
from tools.searchqa_corpus.lore import SEED, Dice, Entity, World
from tools.searchqa_corpus.tell import RELATIONS, Relation

CORPUS = Path(__file__).resolve().parents[2] / "envs/searchqa/corpus"
NUM_QUESTIONS = {"train": 4_000, "eval": 1_200}  # half of them take one search, half two
# these phrases give the profession away
_IMPLIED = ("maker", "architect", "inventor", "finder", "climber", "victor")

Row = dict[str, Any]


def passages(world: World) -> dict[str, str]:
    """Return the passages of all entities, title -> text, in shuffled order."""
    dice = Dice(SEED + 1)
    texts = {entity.name: tell.passage(entity, dice) for entity in world.entities()}
    return {title: texts[title] for title in dice.shuffled(list(texts))}


def questions(world: World, texts: dict[str, str]) -> list[Row]:
    """Return the questions of both splits, with equal shares of each kind of question as far as the
    world has enough.
    """
    dice = Dice(SEED + 2)
    rows: list[Row] = []
    for split, count in NUM_QUESTIONS.items():
        entities = [entity for entity in world.entities() if entity.split == split]
        chosen = _even(_one_hop(entities, dice), count // 2, dice)
        chosen += _even(_two_hop(entities, texts, dice), count - count // 2, dice)
        rows += dice.shuffled(chosen)
    return rows


def contains(text: str, phrase: str) -> bool:
    """Return True if the text contains the words of `phrase` in sequence."""
    return f" {_words(phrase)} " in f" {_words(text)} "


def build() -> dict[str, bytes]:
    """Generate the embedded corpus, passages and questions. Result: file name -> uncompressed
    content.
    """
    world = World()
    texts = passages(world)
    rows = ({"title": title, "text": text} for title, text in texts.items())
    return {
        "passages.jsonl.gz": _lines(rows),
        "questions.jsonl.gz": _lines(questions(world, texts)),
    }


def write(folder: Path = CORPUS) -> None:
    """Write the data files.
    Their compressed bytes depend on the zlib version, their content does not.
    """
    for name, content in build().items():
        (folder / name).write_bytes(gzip.compress(content, 9, mtime=0))


def _one_hop(entities: Sequence[Entity], dice: Dice) -> Iterator[tuple[str, Row]]:
    for entity in entities:
        for relation in RELATIONS:
            if relation.kind == entity.kind and relation.fact in entity.facts:
                text = tell.ask(relation, entity, tell.phrase(entity), dice)
                value, hops = entity.facts[relation.fact], [(entity, relation)]
                yield f"{relation.kind} {relation.fact}", _row(entity.split, text, value, hops)


def _two_hop(
    entities: Sequence[Entity], texts: dict[str, str], dice: Dice
) -> Iterator[tuple[str, Row]]:
    """Yield (kind, row) of two-hop questions that need both searches: neither the question nor the
    first passage contains the answer, the second passage does not name the question's entity, and
    the question does not name the second entity.
    """
    for entity in entities:
        for first in RELATIONS:
            between = entity.facts.get(first.fact)
            if first.kind != entity.kind or not first.bridge or not isinstance(between, Entity):
                continue
            for second in RELATIONS:
                if second.kind != between.kind or second.fact not in between.facts:
                    continue
                if second.fact == "profession" and first.fact in _IMPLIED:
                    continue
                value = between.facts[second.fact]
                text = tell.ask(second, between, tell.bridge(first, entity), dice)
                hops = [(entity, first), (between, second)]
                given_away = [(text, between.name), (texts[between.name], entity.name)]
                for form in tell.answers(value):
                    given_away += [(text, form), (texts[entity.name], form)]
                if not any(contains(shown, phrase) for shown, phrase in given_away):
                    kind = f"{first.kind} {first.fact} {second.fact}"
                    yield kind, _row(entity.split, text, value, hops)


def _row(
    split: str, text: str, value: Entity | int | str, hops: Sequence[tuple[Entity, Relation]]
) -> Row:
    return {
        "split": split,
        "question": text,
        "answers": tell.answers(value),
        "hops": [
            {
                "query": tell.query(relation, entity),
                "title": entity.name,
                "finds": tell.answers(entity.facts[relation.fact])[0],
            }
            for entity, relation in hops
        ],
    }


def _even(candidates: Iterable[tuple[str, Row]], count: int, dice: Dice) -> list[Row]:
    """Return `count` rows, taken from each kind in turn; a kind without rows left is skipped."""
    by_kind: dict[str, list[Row]] = {}
    for kind, row in candidates:
        by_kind.setdefault(kind, []).append(row)
    piles = [dice.shuffled(rows) for rows in by_kind.values()]
    total = sum(map(len, piles))
    assert total >= count, f"the world has only {total} of {count} questions"
    chosen: list[Row] = []
    while len(chosen) < count:
        piles = [pile for pile in piles if pile]
        chosen += [pile.pop() for pile in piles]
    return chosen[:count]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


if __name__ == "__main__":
    write()
