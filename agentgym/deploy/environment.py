"""The servers a run plays on: configured ones, those that are kept, or its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from agentgym.config import RunConfig
from agentgym.deploy.kept import kept_for
from agentgym.deploy.local import local_env
from agentgym.private import token_of
from agentgym.types import Endpoint, Endpoints


@contextlib.contextmanager
def local_environment(cfg: RunConfig, expert: bool) -> Iterator[Endpoints]:
    """The configured servers of each environment; else the kept one; else one local process for
    as long as it is needed. An expert is asked in a process of its own.

    Errors: ConfigError where a kept server is not what this run needs; see `local_env`.
    """
    with contextlib.ExitStack() as stack:
        endpoints: dict[str, Sequence[str]] = {}
        for env in cfg.envs:
            log_path = cfg.state_dir / "logs" / f"{env.name}{'-expert' if expert else ''}.log"
            if env.endpoints and not expert:
                # for workers elsewhere
                endpoints[env.name] = [Endpoint(url, token_of(url)) for url in env.endpoints]
            elif not expert and (kept := kept_for(cfg, env)) is not None:
                endpoints[env.name] = [kept.endpoint]
            else:
                endpoints[env.name] = stack.enter_context(
                    local_env(env, expert=expert, log_path=log_path)
                )
        yield endpoints
