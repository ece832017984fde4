"""Environments by name: those of this package, and whatever installed packages offer under the
entry point group `agentgym.envs`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from envs.env import EnvSpec

ENTRY_POINT_GROUP = "agentgym.envs"
BUILT_IN = {
    name: f"envs.{name}:spec"
    for name in ("babyai", "sciworld", "searchqa", "textcraft", "webarena")
}


def known() -> dict[str, EntryPoint]:
    """Every environment that is installed here, by name."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return found | {
        name: EntryPoint(name, target, ENTRY_POINT_GROUP) for name, target in BUILT_IN.items()
    }


def load_spec(name: str, options: dict[str, Any]) -> EnvSpec:
    """Errors: ValueError in one line, for an unknown name, for options the environment refuses
    and for what it lacks on this machine.
    """
    found = known()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(found))}"
        raise ValueError(f"unknown environment {name!r}; {hint}")
    make: Callable[[dict[str, Any]], EnvSpec] = found[name].load()
    return make(options)
