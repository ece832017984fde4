"""A step in a process of its own, which ends with the one that started it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import yaml

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.owned import owned_process, tail
from agentgym.store.files import write_whole

BAD_INPUT = 2  # exit code of the command line
POLL_S = 0.1
TIMEOUT_S = 24 * 3600.0


class Stopped(RuntimeError):
    """A process was ended before its end; what it committed stays."""


def run_child(
    step: str,
    cfg: RunConfig,
    *,
    title: str,
    place: str,
    with_parents: bool = False,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Bring a step to its end with `agentgym step`, its parameters written out.

    title: of it in errors; place: of its parameters and its log in the state folder; wait_s: for a
    step that another process runs; stop: once set, the process is ended, what it committed stays.
    Errors: ConfigError, RuntimeError with the end of the log, both with the title; Stopped.
    """
    params = cfg.state_dir / f"{place}.yaml"
    write_whole(params, yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False).encode())
    log_path = cfg.state_dir / "logs" / f"{place}.log"
    command = [sys.executable, "-m", "agentgym", "step", step, "--params", str(params)]
    command += ["--wait", str(wait_s), "--owner-pipe"]
    if with_parents:
        command.append("--with-parents")
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout_s
    with owned_process(command, log_path=log_path, env={}) as process:
        while process.poll() is None:
            if stop.wait(POLL_S):
                raise Stopped(f"{title} was stopped; the same command goes on from its last commit")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{title} did not end within {timeout_s:g} s\n{tail(log_path)}")
    if process.returncode:
        kind = ConfigError if process.returncode == BAD_INPUT else RuntimeError
        raise kind(f"{title}: {_last_line(log_path)}; its log is {log_path}")


def _last_line(log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return (
        lines[-1].removeprefix("failed: ").removeprefix("error: ") if lines else "it said nothing"
    )
