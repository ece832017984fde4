"""Exact match and F1 of short answers, as SQuAD's evaluation defines them (arXiv:1606.05250,
section 6.1).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return the text in lower case without ASCII punctuation, articles and extra white space."""
    return " ".join(
        re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()
    )


def exact_match(prediction: str, golden: Iterable[str]) -> bool:
    """Return True if the prediction equals a golden answer after normalisation; an empty one never
    does.

    If normalisation leaves nothing of a golden answer ("A"), the unnormalised texts are compared in
    lower case.
    """
    plain, normal = prediction.strip().lower(), normalise(prediction)
    return bool(plain) and any(
        normal == normalise(answer) if normalise(answer) else plain == answer.strip().lower()
        for answer in golden
    )


def f1(prediction: str, golden: Iterable[str]) -> float:
    """Best harmonic mean of word precision and recall over the golden answers, 0 to 1."""
    return max(
        (_f1(normalise(prediction).split(), normalise(answer).split()) for answer in golden),
        default=0.0,
    )


def _f1(predicted: list[str], expected: list[str]) -> float:
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0
