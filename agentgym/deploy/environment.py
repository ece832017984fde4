"""Servers that a run plays on: configured ones, kept ones, its own processes, or fleets on
Kubernetes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence

from agentgym.config import EnvConfig, RunConfig
from agentgym.deploy.keepers import keep, kept_for
from agentgym.deploy.local import local_env
from agentgym.private import token_of
from agentgym.types import Endpoint, Endpoints


@contextlib.contextmanager
def environment_servers(cfg: RunConfig, expert: bool, run: str = "") -> Iterator[Endpoints]:
    """Yield endpoints by environment.

    An environment with `env.deploy: kubernetes` gets a fleet. Any other gets its configured
    servers, else its kept server (`env.keep` starts one, which stays), else a local process for the
    length of the block.
    Experts get servers of their own.
    run: name of the fleets; empty: a random one.
    Errors: ConfigError if a kept server does not fit this run; see `local_env`, and
    `agentgym.deploy.kubernetes.fleets`.
    """
    with contextlib.ExitStack() as stack:
        endpoints: dict[str, Sequence[str]] = {}
        if of_fleets := [env for env in cfg.envs if env.deploy == "kubernetes"]:
            from agentgym.deploy.kubernetes import fleets

            run = run or f"u{secrets.token_hex(6)}"
            endpoints |= stack.enter_context(fleets(cfg, of_fleets, expert=expert, run=run))
        for env in cfg.envs:
            if env not in of_fleets:
                endpoints[env.name] = _local(cfg, env, expert, stack)
        yield endpoints


def _local(
    cfg: RunConfig, env: EnvConfig, expert: bool, stack: contextlib.ExitStack
) -> Sequence[Endpoint]:
    log_path = cfg.state_dir / "logs" / f"{env.name}{'-expert' if expert else ''}.log"
    if env.endpoints and not expert:
        # workers on other machines need the token too
        return [Endpoint(url, token_of(url, env.name)) for url in env.endpoints]
    if not expert and (server := keep(cfg, env) if env.keep else kept_for(cfg, env)) is not None:
        return [server.endpoint]
    return stack.enter_context(local_env(env, expert=expert, log_path=log_path))
