"""Environments recorded in a store, started here only as the owner's configuration allows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from agentgym.config.section import ConfigError
from agentgym.config.sections import EnvConfig
from agentgym.trust import outward, unowned


def owned_env(env: EnvConfig, owner_envs: Sequence[EnvConfig]) -> EnvConfig:
    """Return a recorded environment as it may be started here.
    It has the servers of the owner's configuration if the same environment is there, else none.

    owner_envs: the environments of the owner's configuration.
    Errors: ConfigError if an option names an address, a path or a variable that the owner's
    configuration does not have.
    """
    same_name = [owned for owned in owner_envs if owned.name == env.name]
    refused = unowned(env.name, env.options, [owned.options for owned in same_name])
    if refused:
        override = shlex.quote(f"env={json.dumps({'name': env.name, 'options': env.options})}")
        raise ConfigError(
            f"{env.name} as on record would use {asked_of(env)}, which your configuration does not"
            f" name; if you trust that, add --set {override}"
        )
    same = [
        owned for owned in same_name if (owned.options, owned.dialect) == (env.options, env.dialect)
    ]
    base = same[0] if same else EnvConfig(name=env.name)
    settings = {"options": env.options, "dialect": env.dialect, "weight": env.weight}
    return base.model_copy(update=settings)


def asked_of(env: EnvConfig) -> str:
    """Return the addresses, paths and variables in an environment's options, for people."""
    values = outward(env.name, env.options)
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items())
