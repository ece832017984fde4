"""An environment's options as given by the user: missing ones get their default, unknown ones are
an error that names them. In each function `env` is the environment's name, for the error.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

SECRET_PREFIX = "AGENTGYM_SECRET_"  # noqa: S105  (no secret: prefix of the variables' names)


def choose(env: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, with defaults for missing ones, in the order of the defaults.
    Errors: ValueError naming an unknown option and the nearest known one.
    """
    for key in options:
        if key not in defaults:
            raise ValueError(f"{env} has no option {key!r}{hint(key, defaults)}")
    return {**defaults, **options}


def whole_number(
    env: str, options: Mapping[str, Any], key: str, low: int, high: float = math.inf
) -> int:
    """Return the option `key`, a whole number from `low` to `high`. Errors: ValueError."""
    value = options[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        span = f"from {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{env} option {key}: expected a whole number {span}, got {value!r}")
    return value


def seconds(env: str, options: Mapping[str, Any], key: str, high: float) -> float:
    """Return the option `key`, a number of seconds above 0, up to `high`. Errors: ValueError."""
    value = options[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
        raise ValueError(f"{env} option {key}: expected seconds up to {high:g}, got {value!r}")
    return float(value)


def one_of(env: str, options: Mapping[str, Any], key: str, known: Sequence[str]) -> Any:
    """Return the option `key`, a text of `known`. Errors: ValueError that names the nearest one."""
    check_known(env, key, "value", [options[key]], known)
    return options[key]


def names(
    env: str, options: Mapping[str, Any], key: str, noun: str, known: Collection[str], example: str
) -> tuple[str, ...]:
    """Return the option `key`, one or more names of `known`, as a tuple. Errors: ValueError.

    noun, example: for the error, the kind of thing that has these names, and one of them.
    """
    value = options[key]
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if not is_list or not value:
        raise ValueError(
            f'{env} option {key}: expected "agentgym" or a list of {noun} names such as'
            f' ["{example}"], got {value!r}'
        )
    check_known(env, key, noun, value, known)
    return tuple(value)


def check_known(
    env: str, key: str, noun: str, given: Iterable[Any], known: Collection[str]
) -> None:
    """Raise ValueError for the first of the option's values that is not known. noun: their kind."""
    for value in given:
        if value not in known:
            raise ValueError(f"{env} option {key}: unknown {noun} {value!r}{hint(value, known)}")


def hint(word: object, known: Iterable[str], cutoff: float = 0.0) -> str:
    """Return "; did you mean 'x'?" with the nearest word; empty if none is as near as `cutoff`."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def secret_variable(what: str, name: Any) -> str:
    """Check and return `name`, an environment variable whose value is sent to an option's address.

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
