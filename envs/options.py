"""An environment's options as a person gives them: what is not said has its default, what is not known is named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def choose(env: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All options, in the defaults' order. Errors: ValueError naming an unknown one and the nearest known."""
    for key in options:
        if key not in defaults:
            raise ValueError(f"{env} has no option {key!r}; did you mean {nearest(key, defaults)!r}?")
    return {**defaults, **options}


def nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]
