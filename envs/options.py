"""An environment's options as given by the user: missing ones get their default, unknown ones are
an error that names them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_PREFIX = "AGENTGYM_SECRET_"  # noqa: S105  (no secret: prefix of the variables' names)


def choose(env: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, in the order of the defaults.
    Errors: ValueError naming an unknown option and the nearest known one.
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
    """Return `name`, a variable whose value is sent to an address given in the same options.

    what: the option, for the error.
    Errors: ValueError if the variable lacks SECRET_PREFIX (no other variable may be sent out) or is
    not set.
    """
    if not isinstance(name, str) or not re.fullmatch(f"{SECRET_PREFIX}[A-Z0-9_]+", name):
        raise ValueError(
            f"{what}: options may only name variables that begin with {SECRET_PREFIX}, such as"
            f" {SECRET_PREFIX}JUDGE_KEY, got {name!r}; put the secret into one"
        )
    if name not in os.environ:
        raise ValueError(f"{what}: the variable {name} is not set")
    return name
