"""An environment server as a child process: started with a deadline, ended whatever happens to
its owner.
"""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from agentgym.config import ConfigError, EnvConfig
from agentgym.deploy.owned import finished_process, owned_process, tail
from agentgym.types import Endpoint
from envs.wire import TOKEN_VARIABLE, ErrorKind, ErrorReply

logger = logging.getLogger(__name__)

POLL_S = 0.05
BAD_INPUT = 2  # exit code of a server that refuses its name or options
IDENTITIES_TIMEOUT_S = 600.0  # a thousand worlds of BabyAI take 1 to 7 s


class IdentitiesUnknown(RuntimeError):
    """This machine cannot determine which tasks are equal. The message gives the reason."""


@contextmanager
def local_env(env: EnvConfig, *, expert: bool, log_path: Path) -> Iterator[list[Endpoint]]:
    """Start one server on a free loopback port, yield its endpoint in a list once it is ready for
    sessions, and end it on exit. Its output is appended to log_path. expert: it has POST /expert.

    The server requires a token of its own, made here and passed in its environment, where only this
    user can read it.
    It watches a pipe that only this process holds, so it ends even if this process is killed.
    Errors: ConfigError if it refuses its name or options; RuntimeError with the end of its log, if
    it exits or is not ready within env.start_timeout_s.
    """
    # the server removes it when it ends
    port_file = log_path.with_name(f"{env.name}-{secrets.token_hex(8)}.port")
    command = [*_envs("serve", env), "--owner-pipe", "--port", "0", "--port-file", str(port_file)]
    command += ["--max-sessions", str(env.max_sessions), "--session-ttl", str(env.session_ttl_s)]
    if expert:
        command.append("--expert")
    token = secrets.token_urlsafe(32)
    with owned_process(
        command, log_path=log_path, env={"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: token}
    ) as process:
        try:
            endpoint = _wait_until_ready(process, env, log_path, port_file)
        finally:
            port_file.unlink(missing_ok=True)
        logger.info("environment %s at %s, process %d", env.name, endpoint, process.pid)
        yield [Endpoint(endpoint, token)]


def check_local_env(env: EnvConfig) -> None:
    """Raise ConfigError if the environment is local and its server would refuse name or options,
    or does not answer within env.start_timeout_s.
    """
    if env.is_elsewhere:
        return
    limit_s = env.start_timeout_s
    try:
        checked = finished_process([*_envs("serve", env), "--check"], timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"env: {env.name} did not check its options within {limit_s:g} s, which is"
            " env.start_timeout_s; raise it, or look for what keeps the environment from starting"
        ) from None
    if checked.returncode == BAD_INPUT:
        raise ConfigError(f"env: {_refusal(checked.stderr)}")


def task_identities(env: EnvConfig, task_ids: Sequence[int]) -> list[str | None]:
    """Return a digest of each task, in order: equal digests mean one task under several ids.
    None: the id names no task.

    A child process computes them. Errors: ConfigError if a local server would refuse the
    environment's name or options; IdentitiesUnknown, also after IDENTITIES_TIMEOUT_S; RuntimeError
    if the child process fails.
    """
    if env.dialect != "native":
        message = f"servers of dialect {env.dialect} do not say which tasks are equal"
        raise IdentitiesUnknown(message)
    try:
        command, tasks = _envs("identities", env), json.dumps(list(task_ids))
        result = finished_process(command, timeout_s=IDENTITIES_TIMEOUT_S, given=tasks)
    except subprocess.TimeoutExpired:
        raise IdentitiesUnknown(f"no answer within {IDENTITIES_TIMEOUT_S:g} s") from None
    if result.returncode == BAD_INPUT and env.is_elsewhere:
        # the servers may have what is missing here
        raise IdentitiesUnknown(_refusal(result.stderr))
    if result.returncode == BAD_INPUT:
        raise ConfigError(f"env: {_refusal(result.stderr)}")
    if result.returncode:
        raise RuntimeError(
            f"`python -m envs identities {env.name}` ended with code {result.returncode}:"
            f" {result.stderr.strip()[-1000:]}"
        )
    digests: list[str | None] | None = json.loads(result.stdout)
    if digests is None:
        raise IdentitiesUnknown("the environment does not say which of its tasks are equal")
    return digests


def _envs(command: str, env: EnvConfig) -> list[str]:
    return [sys.executable, "-m", "envs", command, env.name, "--options", json.dumps(env.options)]


def _refusal(stderr: str) -> str:
    return stderr.strip().splitlines()[-1].removeprefix("python -m envs: ")


def _wait_until_ready(
    process: subprocess.Popen[bytes], env: EnvConfig, log_path: Path, port_file: Path
) -> str:
    deadline = time.monotonic() + env.start_timeout_s
    state = "it does not listen yet"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            check_local_env(env)
            raise RuntimeError(
                f"environment server {env.name!r} exited with code {process.returncode} while"
                f" starting\n{tail(log_path)}"
            )
        if port_file.exists():
            endpoint = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8').strip()}"
            failure = _readiness(endpoint)
            if failure is None:
                return endpoint
            if failure.kind is ErrorKind.ENV_CRASHED:
                raise RuntimeError(
                    f"environment server {env.name!r} is unusable:"
                    f" {failure.message}\n{tail(log_path)}"
                )
            state = failure.message
        time.sleep(POLL_S)
    raise RuntimeError(
        f"environment server {env.name!r} was not ready within {env.start_timeout_s:g} s"
        f" ({state})\n{tail(log_path)}"
    )


def _readiness(endpoint: str) -> ErrorReply | None:
    """Return None if the server is ready, else its error, or NOT_READY without a valid answer."""
    # never use a proxy on loopback
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{endpoint}/readyz", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        try:
            return ErrorReply.model_validate_json(error.read())
        except ValidationError:
            reason = f" answered {error.code}"
    except OSError as error:
        reason = f": {error}"
    return ErrorReply(kind=ErrorKind.NOT_READY, message=f"{endpoint}/readyz{reason}")
