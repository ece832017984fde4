"""The generator's output equals the committed files."""

import gzip
import json

import pytest

from envs.searchqa import questions, retrievers
from tools.searchqa_corpus import generate


def lines(path):
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]


@pytest.fixture(scope="module")
def told():
    return {row["title"]: row["text"] for row in lines(retrievers.PASSAGES)}


def test_the_generator_reproduces_the_files_byte_for_byte():
    for name, content in generate.build().items():
        stored = (generate.CORPUS / name).read_bytes()
        assert stored[4:8] == b"\0\0\0\0"  # no timestamp
        assert gzip.decompress(stored) == content, (
            f"{name} is not what the generator writes: python -m tools.searchqa_corpus.generate"
        )


def test_there_are_enough_passages_and_they_are_small():
    rows = lines(retrievers.PASSAGES)
    assert len(rows) == len({row["title"] for row in rows}) == 2496
    assert len({row["text"] for row in rows}) == 2496
    assert all(20 < len(row["text"]) < 400 and "{" not in row["text"] for row in rows)
    assert (
        sum(path.stat().st_size for path in (retrievers.PASSAGES, questions.QUESTIONS)) < 1_000_000
    )


def test_most_names_have_a_near_twin(told):
    """A search for one name also finds similar names."""
    first_words, last_words = [], []
    for title in told:
        first_words.append(title.split()[0])
        last_words.append(title.split()[-1])
    twins = [
        t
        for t in told
        if first_words.count(t.split()[0]) > 1 or last_words.count(t.split()[-1]) > 1
    ]
    assert len(twins) > 0.8 * len(told)
