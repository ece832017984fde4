"""Environments by name: those of this package, and whatever installed packages offer under the
entry point group `agentgym.envs`.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import envs
from envs.env import EnvSpec

ENTRY_POINT_GROUP = "agentgym.envs"
# each package of this folder is an environment, and makes its `EnvSpec` with `spec`
BUILT_IN = {
    found.name: f"envs.{found.name}:spec"
    for found in pkgutil.iter_modules(envs.__path__)
    if found.ispkg
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
