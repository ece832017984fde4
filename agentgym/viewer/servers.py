"""Environment servers for the viewer: started on first use, ended when idle."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.config import ConfigError, EnvConfig, RunConfig, owned_env
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import check_local_env
from agentgym.store.manifest import canonical_json

IDLE_S = 180.0
MAX_SESSIONS = 16  # of a server that the viewer starts
SESSION_TTL_S = 1_800.0  # long, for a person who thinks


class Missing(RuntimeError):
    """An environment that cannot be used here; the text gives the reason and a remedy."""


@dataclass
class _Open:
    stack: contextlib.ExitStack
    endpoints: Sequence[str]
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class Servers:
    """One server for each environment and its options."""

    def __init__(self, cfg: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Prefer the endpoints that the viewer's owner configured, for the configured options."""
        self._cfg, self._clock = cfg, clock
        self._open: dict[tuple[bytes, bool], _Open] = {}
        self._lock = threading.Lock()  # locked while a server starts
        self._counting = threading.Lock()  # locked only for moments

    @contextlib.contextmanager
    def use(self, env: EnvConfig, *, expert: bool = False) -> Iterator[Sequence[str]]:
        """Yield the endpoints of an environment's server, started if there is none with these
        options. After the block it continues to run, until `end_idle` or `close`.

        expert: a server that can also be asked for expert actions.
        Errors: Missing if the owner did not configure these options, or the server does not start.
        """
        # options from a store must not open anything the owner did not configure
        env = self.known(env)
        key = (canonical_json([env.name, env.options, env.dialect, list(env.endpoints)]), expert)
        with self._lock:  # a start takes seconds; other callers wait for the same server
            if key not in self._open:
                self._open[key] = self._start(env, expert)
            server = self._open[key]
            with self._counting:
                server.users += 1
        try:
            yield server.endpoints
        finally:
            with self._counting:
                server.users -= 1
                server.used = self._clock()

    def known(self, env: EnvConfig) -> EnvConfig:
        """Return the environment with the owner's endpoints. Errors: Missing for other options."""
        try:
            trusted = owned_env(env, self._cfg.envs)
        except ConfigError as error:
            raise Missing(str(error)) from None
        return trusted.model_copy(update={"deploy": "local", "replicas": "auto"})

    def end_idle(self, than_s: float = IDLE_S) -> None:
        """End the servers that were not used for `than_s` seconds."""
        with self._lock, self._counting:
            now = self._clock()
            for key, server in list(self._open.items()):
                if not server.users and now - server.used >= than_s:
                    del self._open[key]
                    server.stack.close()

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            for server in self._open.values():
                server.stack.close()
            self._open.clear()

    def _start(self, env: EnvConfig, expert: bool) -> _Open:
        if env.dialect != "native" and not env.endpoints:
            raise Missing(
                f"environment {env.name} was served elsewhere (dialect {env.dialect}); name its"
                " servers: agentgym view --set env.endpoints=[URL]"
            )
        with contextlib.ExitStack() as stack:
            try:
                check_local_env(env)
                few = env.model_copy(
                    update={"max_sessions": MAX_SESSIONS, "session_ttl_s": SESSION_TTL_S}
                )
                cfg = self._cfg.model_copy(update={"env": few, "mix": ()})
                endpoints = stack.enter_context(environment_servers(cfg, expert))
            except (ConfigError, RuntimeError, OSError) as error:
                first = str(error).strip().splitlines()[0]
                raise Missing(f"environment {env.name} cannot be had here: {first}") from error
            return _Open(stack.pop_all(), endpoints[env.name], used=self._clock())


def environment_of(config: Mapping[str, Any], name: str) -> EnvConfig:
    """Return an environment with the options of a step's settings. Errors: Missing."""
    candidates = [config.get("env"), *(config.get("mix") or ())]
    candidates += [
        settings.get("env") for settings in (config.get("protocol") or {}).get("envs", ())
    ]
    for settings in candidates:
        if isinstance(settings, Mapping) and settings.get("name") == name:
            try:
                return EnvConfig.model_validate(
                    {
                        key: settings[key]
                        for key in ("name", "options", "dialect")
                        if key in settings
                    }
                )
            except ValueError as error:
                raise Missing(f"the options of {name} on record are refused: {error}") from None
    raise Missing(f"the step does not say how its environment {name} was set up")


def config_of(text: str | None) -> dict[str, Any]:
    """Return a step's settings from their text in the index."""
    config = json.loads(text or "{}")
    return config if isinstance(config, dict) else {}
