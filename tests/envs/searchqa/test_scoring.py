"""Exact match and F1, worked out by hand."""

import pytest

from envs.searchqa.world import exact_match, f1, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles", "beatles"),
        ("an apple, a day", "apple day"),
        ("U.S.A.", "usa"),
        ("Anne of the Thousand Days", "anne of thousand days"),
        ("rock'n'roll\n(1955)", "rocknroll 1955"),
        ("Ångström – é", "ångström – é"),  # only ASCII punctuation is removed
        ("a.n", ""),  # punctuation is removed first, and the rest is an article
        ("the", ""),
        ("", ""),
    ],
)
def test_normalisation_removes_case_punctuation_articles_and_white_space(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golden", "right"),
    [
        ("paris", ["Paris"], True),
        ("The Paris!", ["Paris"], True),
        ("Paris, France", ["Paris"], False),
        ("Paris, France", ["Lyon", "paris france"], True),
        ("1,204", ["1204"], True),
        ("12 04", ["1204"], False),
        ("", ["Paris"], False),
        ("  \n", [""], False),
        # a golden answer that normalizes to the empty text is compared unchanged
        ("the", ["The"], True),
        ("A", ["a"], True),
        ("an", ["A"], False),
        ("?", ["the"], False),
        ("Paris", [], False),
    ],
)
def test_exact_match(prediction, golden, right):
    assert exact_match(prediction, golden) is right


@pytest.mark.parametrize(
    ("prediction", "golden", "score"),
    [
        ("Paris", ["paris"], 1.0),
        ("the city of Paris", ["Paris"], 0.5),  # 1 of 3 and 1 of 1: 2 / 4
        ("Marie Curie", ["Marie Sklodowska Curie"], 0.8),  # 2 of 2 and 2 of 3: 4 / 5
        ("new new york", ["New York"], 0.8),  # repeated words count once: 2 of 3 and 2 of 2
        ("York", ["Paris", "New York"], 2 / 3),  # the best of several answers
        ("London", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_f1(prediction, golden, score):
    assert f1(prediction, golden) == pytest.approx(score)
