"""Questions by task id: the interface of a set of questions, and the embedded set.

In the embedded set and in that of the benchmarks, ids below 51713 are for evaluation and the others
for training, so a published list of ids refers to the same split in both.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

QUESTIONS = Path(__file__).resolve().parent / "corpus" / "questions.jsonl.gz"
FIRST_TRAIN_ID = 51_713


@dataclass(frozen=True, slots=True)
class Hop:
    """One search on the way to the answer: a query, and the title and fact of a document."""

    query: str
    title: str
    finds: str


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]  # all right answers
    data_source: str
    hops: tuple[Hop, ...] = ()  # empty if unknown


class Questions(Protocol):
    """A set of questions. Equal ids give equal questions on every machine."""

    def __getitem__(self, task_id: int) -> Question:
        """Return a question. Errors: ValueError naming what is missing."""


class Embedded:
    """The questions about the embedded corpus. Every id >= 0 is valid; after the end of a split's
    list its questions repeat.
    """

    def __init__(self, train: Sequence[Question], evaluation: Sequence[Question]) -> None:
        self.train = tuple(train)
        self.eval = tuple(evaluation)

    def __getitem__(self, task_id: int) -> Question:
        if task_id < 0:
            raise ValueError(f"task id {task_id} is negative")
        if task_id < FIRST_TRAIN_ID:
            return self.eval[task_id % len(self.eval)]
        return self.train[(task_id - FIRST_TRAIN_ID) % len(self.train)]


@cache
def embedded() -> Embedded:
    """Return the embedded questions; their file is read once per process."""
    splits: dict[str, list[Question]] = {"train": [], "eval": []}
    with gzip.open(QUESTIONS, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            hops = tuple(Hop(**hop) for hop in row["hops"])
            source = "embedded_one_hop" if len(hops) == 1 else "embedded_two_hop"
            question = Question(row["question"], tuple(row["answers"]), source, hops)
            splits[row["split"]].append(question)
    return Embedded(splits["train"], splits["eval"])
