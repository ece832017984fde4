"""Environment servers that pages play on: started when first asked for, ended once nobody asks."""

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
MAX_SESSIONS = 16  # of a server of ours
SESSION_TTL_S = 1_800.0  # a person may think for long


class Missing(RuntimeError):
    """An environment that cannot be had here; the text says why and what to do."""


@dataclass
class _Open:
    stack: contextlib.ExitStack
    endpoints: Sequence[str]
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class Servers:
    """One server of each environment and its options at a time."""

    def __init__(self, cfg: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """cfg: whose endpoints and kept servers are used where they are of the same options."""
        self._cfg, self._clock = cfg, clock
        self._open: dict[tuple[bytes, bool], _Open] = {}
        self._lock = threading.Lock()  # held while one starts
        self._counting = threading.Lock()  # held for moments

    @contextlib.contextmanager
    def use(self, env: EnvConfig, *, expert: bool = False) -> Iterator[Sequence[str]]:
        """Endpoints of a server, which stays for a while afterwards. Errors: Missing."""
        env = self.known(env)  # whoever asks: an option of a store opens nothing by itself
        key = (canonical_json([env.name, env.options, env.dialect, list(env.endpoints)]), expert)
        with self._lock:  # a start takes seconds, and whoever else asks wants the same
            if key not in self._open:
                self._open[key] = self._start(env, expert)
            found = self._open[key]
            with self._counting:
                found.users += 1
        try:
            yield found.endpoints
        finally:
            with self._counting:
                found.users -= 1
                found.used = self._clock()

    def known(self, env: EnvConfig) -> EnvConfig:
        """Return an environment with the owner's endpoints, where the owner has the same one.
        Errors: Missing where its options name what the owner's do not.
        """
        try:
            own = owned_env(env, self._cfg.envs)
        except ConfigError as error:
            raise Missing(str(error)) from None
        return own.model_copy(update={"deploy": "local", "replicas": "auto"})

    def end_idle(self, than_s: float = IDLE_S) -> None:
        """End those that nobody has used for so long."""
        with self._lock, self._counting:
            now = self._clock()
            for key, each in list(self._open.items()):
                if not each.users and now - each.used >= than_s:
                    del self._open[key]
                    each.stack.close()

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            for each in self._open.values():
                each.stack.close()
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
    """An environment as the step had it that played there. config: of its manifests.
    Errors: Missing.
    """
    told = [config.get("env"), *(config.get("mix") or ())]
    told += [each.get("env") for each in (config.get("protocol") or {}).get("envs", ())]
    for each in told:
        if isinstance(each, Mapping) and each.get("name") == name:
            try:
                return EnvConfig.model_validate(
                    {key: each[key] for key in ("name", "options", "dialect") if key in each}
                )
            except ValueError as error:
                raise Missing(f"the options of {name} on record are refused: {error}") from None
    raise Missing(f"the step does not say how its environment {name} was set up")


def config_of(text: str | None) -> dict[str, Any]:
    """A step's settings, as the index has them."""
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}
