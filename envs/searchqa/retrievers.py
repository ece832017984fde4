"""Retrieval of documents for a query: the protocol, and BM25 over a corpus in memory."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import bm25s
import numpy as np

logging.getLogger("bm25s").setLevel(logging.INFO)  # bm25s itself sets the level DEBUG

PASSAGES = Path(__file__).resolve().parent / "corpus" / "passages.jsonl.gz"
_K1, _B = 1.2, 0.75
_SMALL_WORDS = """
    a an and are as at be by did do does for from had has have he her his how in into is it its of \
on or she that the their there they
    this to was were what when where which who whom whose why will with
"""
_STOPWORDS = frozenset(_SMALL_WORDS.split())


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    text: str


class RetrieverError(RuntimeError):
    """The retriever gave no usable answer: a failure of the environment, not of the policy."""


class Retriever(Protocol):
    """A retriever used by all sessions of a server, from several threads at once."""

    def search(self, query: str, topk: int) -> Sequence[Document]:
        """Return at most `topk` documents, best first; none if nothing matches.
        Errors: RetrieverError.
        """


class Bm25:
    """BM25 (Lucene's variant, k1 1.2, b 0.75) over the title, counted twice, and the text.
    The index is read-only after construction, so threads share it without a lock.

    Equal queries give equal documents in equal order on every machine: scores are rounded to four
    decimals, and of equal scores the earlier document comes first.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        vocabulary: dict[str, int] = {}
        texts = (tokens(f"{d.title} {d.title} {d.text}") for d in self._documents)
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words] for words in texts]
        backends = {"backend": "numpy", "csc_backend": "numpy"}
        self._index = bm25s.BM25(k1=_K1, b=_B, method="lucene", **backends)
        self._index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        self._vocabulary = vocabulary

    def search(self, query: str, topk: int) -> list[Document]:
        """Return at most `topk` documents that share a word with the query, best first."""
        ids = [self._vocabulary[token] for token in tokens(query) if token in self._vocabulary]
        if not ids:
            return []
        scores = np.rint(self._index.get_scores_from_ids(ids) * 1e4)
        best = []
        for _ in range(min(topk, len(scores))):
            first = int(scores.argmax())  # the earliest of equals
            if scores[first] <= 0:
                break
            best.append(self._documents[first])
            scores[first] = 0
        return best


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case, without stop words."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in _STOPWORDS]


@cache
def embedded() -> Bm25:
    """Return the index of the corpus that ships with the package, built once per process."""
    with gzip.open(PASSAGES, "rt", encoding="utf-8") as lines:
        return Bm25([Document(**json.loads(line)) for line in lines])
