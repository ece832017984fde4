"""Environments as a store has them on record, set up here only as far as the owner's own
configuration goes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from agentgym.config.section import ConfigError
from agentgym.config.sections import EnvConfig
from agentgym.trust import outward, unowned


def owned_env(env: EnvConfig, own: Sequence[EnvConfig]) -> EnvConfig:
    """Return an environment on record as it may be started here: with the owner's servers where the
    owner has the same environment, else with none.

    own: the environments of the owner's configuration.
    Errors: ConfigError where an option names an address, a path or a variable that the owner's
    configuration does not have.
    """
    same_name = [each for each in own if each.name == env.name]
    refused = unowned(env.name, env.options, [each.options for each in same_name])
    if refused:
        override = shlex.quote(f"env={json.dumps({'name': env.name, 'options': env.options})}")
        raise ConfigError(
            f"{env.name} as on record would use {asked_of(env)}, which your configuration does not"
            f" name; if you trust that, add --set {override}"
        )
    same = [
        each for each in same_name if (each.options, each.dialect) == (env.options, env.dialect)
    ]
    there = same[0] if same else EnvConfig(name=env.name)
    settings = {"options": env.options, "dialect": env.dialect, "weight": env.weight}
    return there.model_copy(update=settings)


def asked_of(env: EnvConfig) -> str:
    """Return the addresses, paths and variables in an environment's options, for people."""
    found = outward(env.name, env.options)
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in found.items())
