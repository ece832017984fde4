"""An environment's options as a person gives them: what is not said has its default, what is
not known is named.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_PREFIX = "AGENTGYM_SECRET_"  # noqa: S105  (of names) - the variables that options may name


def choose(env: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All options, in the defaults' order.
    Errors: ValueError naming an unknown one and the nearest known.
    """
    for key in options:
        if key not in defaults:
            raise ValueError(
                f"{env} has no option {key!r}; did you mean {nearest(key, defaults)!r}?"
            )
    return {**defaults, **options}


def nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]


def secret_variable(what: str, name: Any) -> str:
    """The name of a variable whose value is sent to an address that stands in the same options.

    what: the option, for the error.
    Errors: ValueError for any variable that nobody set for this purpose, as its prefix shows, and
    for one that is not set.
    """
    if not isinstance(name, str) or not re.fullmatch(f"{SECRET_PREFIX}[A-Z0-9_]+", name):
        raise ValueError(
            f"{what}: options may only name variables that begin with {SECRET_PREFIX}, such as"
            f" {SECRET_PREFIX}JUDGE_KEY, got {name!r}; put the secret into one"
        )
    if name not in os.environ:
        raise ValueError(f"{what}: the variable {name} is not set")
    return name
