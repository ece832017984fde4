"""Servers that a run plays on: configured ones, kept ones, its own processes, or fleets on
Kubernetes.

Kept servers outlive the runs that use them: started once, ended on request. Each has a keeper, a
process that owns it. The server ends when the keeper gets a signal, when its time is over, or when
the keeper dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.deploy.local import check_local_env, local_env
from agentgym.deploy.owned import tail
from agentgym.private import private_folder, token_of, write_private
from agentgym.store.keys import environment_modules, source_digest
from agentgym.store.lease import process_start
from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Endpoint, Endpoints

POLL_S = 0.1
END_TIMEOUT_S = 30.0


@contextlib.contextmanager
def environment_servers(cfg: RunConfig, expert: bool, run: str = "") -> Iterator[Endpoints]:
    """Yield endpoints by environment.

    An environment with `env.deploy: kubernetes` gets a fleet. Any other gets its configured
    servers, else its kept server, which outlives runs (`env.keep` starts one), else a local process
    for the length of the block.
    With `expert`, every environment gets a new server with an expert, which ends with the block.
    run: name of the fleets; empty: a random one.
    Errors: ConfigError if a kept server does not fit this run; those of `keep`, of `local_env` and
    of `agentgym.deploy.kubernetes.fleets`.
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


@dataclass(frozen=True)
class KeptServer:
    """Record of a server that outlives runs, written by its keeper, the process that owns it."""

    pid: int  # of the keeper
    started: str  # distinguishes it from a later process of that pid
    env: str
    options: dict[str, object]
    source: str  # digest of the code it was started from
    max_sessions: int
    url: str
    token: str = field(repr=False)

    @property
    def is_alive(self) -> bool:
        return process_start(self.pid) == self.started

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.token)


def keep(cfg: RunConfig, env: EnvConfig) -> KeptServer:
    """Return the environment's kept server, which outlives runs; start it if none runs.

    Errors: ConfigError if the running one does not fit this run, or if the environment refuses its
    options; RuntimeError with the end of its log if it ends, or is not ready within
    env.start_timeout_s (it is then ended).
    """
    existing = kept_for(cfg, env)
    if existing is not None:
        return existing
    check_local_env(env)
    file = _file(cfg.state_dir, env)
    private_folder(file.parent)
    file.unlink(missing_ok=True)
    log_path = cfg.state_dir / "logs" / f"{env.name}-kept.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentgym.deploy.environment", str(file), str(log_path)]
    with log_path.open("ab") as log:
        keeper = subprocess.Popen(
            [*command, env.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it must outlive this process, and signals to its group
        )
    deadline = time.monotonic() + env.start_timeout_s
    while time.monotonic() < deadline:
        server = _read(file)
        if server is not None and server.is_alive:
            return server
        if keeper.poll() is not None:
            raise RuntimeError(f"environment {env.name} did not start\n{tail(log_path)}")
        time.sleep(POLL_S)
    keeper.terminate()
    raise RuntimeError(
        f"environment {env.name} was not ready within {env.start_timeout_s:g} s\n{tail(log_path)}"
    )


def kept_for(cfg: RunConfig, env: EnvConfig) -> KeptServer | None:
    """Return the live kept server for this environment and these options, or None.

    Errors: ConfigError if it was started from other code, or allows fewer sessions than
    env.max_sessions.
    """
    server = _read(_file(cfg.state_dir, env))
    if server is None or not server.is_alive:
        return None
    again = "run the flows envs-down and envs-up again"
    if server.source != _source(env):
        raise ConfigError(
            f"the kept server of environment {env.name} (process {server.pid}) was started from"
            f" other code than this; {again}"
        )
    if server.max_sessions < env.max_sessions:
        raise ConfigError(
            f"the kept server of environment {env.name} has room for {server.max_sessions}"
            f" sessions, env.max_sessions is {env.max_sessions}; {again} with that"
        )
    return server


def end_all(state: Path) -> list[KeptServer]:
    """End all kept servers of this state folder and wait; remove records; return those that ran."""
    ended = []
    for file in sorted((state / "environments").glob("*.json")):
        server = _read(file)
        if server is not None and server.is_alive:
            _end(server)
            ended.append(server)
        file.unlink(missing_ok=True)
    return ended


def _end(server: KeptServer) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        keeper = psutil.Process(server.pid)
        keeper.terminate()
        try:
            keeper.wait(END_TIMEOUT_S)
        except psutil.TimeoutExpired:
            keeper.kill()  # its server watches a pipe from it, and ends too


def _read(file: Path) -> KeptServer | None:
    try:
        return KeptServer(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _file(state: Path, env: EnvConfig) -> Path:
    which = sha256(canonical_json([env.name, env.options]))[:12]
    return state / "environments" / f"{env.name}-{which}.json"


def _source(env: EnvConfig) -> str:
    return source_digest(environment_modules(env.name))


def main(arguments: Sequence[str]) -> int:
    """Start a server and write its record; at a signal, or after `keep_s`, end the server, and
    delete the record. Result: exit code 0. Errors: ConfigError without /proc; those of `local_env`.
    arguments: path of the record, path of the server's log, the environment's settings as JSON.
    """
    file, log_path, env = Path(arguments[0]), Path(arguments[1]), arguments[2]
    settings = EnvConfig.model_validate_json(env)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = process_start(os.getpid())
    if started is None:
        raise ConfigError("kept environments need /proc, to recognize their processes")
    try:
        with local_env(settings, expert=False, log_path=log_path) as endpoints:
            record = KeptServer(
                pid=os.getpid(),
                started=started,
                env=settings.name,
                options=settings.options,
                source=_source(settings),
                max_sessions=settings.max_sessions,
                url=str(endpoints[0]),
                token=endpoints[0].token,
            )
            write_private(file, json.dumps(asdict(record)).encode())
            time.sleep(settings.keep_s)  # or until a signal
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
