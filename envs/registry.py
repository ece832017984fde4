"""Environments by name: those of this package, and those that installed packages offer under the
entry point group `agentgym.envs`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import envs
from envs.env import EnvSpec
from envs.options import hint

ENTRY_POINT_GROUP = "agentgym.envs"
# each package in this folder is an environment; its function `spec` makes the `EnvSpec`
BUILT_IN = {
    package.name: f"envs.{package.name}:spec"
    for package in pkgutil.iter_modules(envs.__path__)
    if package.ispkg
}


def known() -> dict[str, EntryPoint]:
    """Return all installed environments by name; of equal names the built-in one counts."""
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return installed | {
        name: EntryPoint(name, target, ENTRY_POINT_GROUP) for name, target in BUILT_IN.items()
    }


def load_spec(name: str, options: dict[str, Any]) -> EnvSpec:
    """Make the spec of an environment.
    Errors: ValueError in one line, for an unknown name, for options that the environment refuses,
    and for missing requirements that it checks; ImportError if its module cannot be imported.
    """
    available = known()
    if name not in available:
        near = hint(name, available, cutoff=0.4) or f"; known: {', '.join(sorted(available))}"
        raise ValueError(
            f"unknown environment {name!r}{near}; a package of your own must be installed"
        )
    make: Callable[[dict[str, Any]], EnvSpec] = available[name].load()
    return make(options)
