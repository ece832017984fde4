"""An `agentgym` command in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import yaml

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.owned import owned_process, tail
from agentgym.store.posix import write_whole

BAD_INPUT = 2  # exit code of the command line
POLL_S = 0.1
TIMEOUT_S = 24 * 3600.0  # of a command
PAGE = "see "  # begins a command's line that names the page on its error


class Stopped(RuntimeError):
    """A process was stopped before it was done; its commits remain."""


def run_command(
    words: Sequence[str],
    cfg: RunConfig,
    *,
    title: str,
    place: str,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
) -> None:
    """Run `agentgym WORDS` in a process to its end, with these parameters written to a file.

    title: names the command in errors. place: path of its parameters and its log in the state
    folder, without suffix. wait_s: how long the command waits for work that another process does.
    stop: once set, the process is stopped and its commits remain.
    Errors: ConfigError for bad input (exit code 2), RuntimeError for other failures and after
    TIMEOUT_S, both with the title and the end of the log, and the page on the error as a note;
    Stopped.
    """
    params = cfg.state_dir / f"{place}.yaml"
    write_whole(params, yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False).encode())
    log_path = cfg.state_dir / "logs" / f"{place}.log"
    command = [sys.executable, "-m", "agentgym", *words, "--params", str(params)]
    command += [*(["--wait", str(wait_s)] if wait_s else []), "--owner-pipe"]
    stop = stop or threading.Event()
    deadline = time.monotonic() + TIMEOUT_S
    with owned_process(command, log_path=log_path, env={}) as process:
        while process.poll() is None:
            if stop.wait(POLL_S):
                raise Stopped(
                    f"{title} was stopped; the same command continues from its last commit"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"{title} did not end within {TIMEOUT_S:g} s\n{tail(log_path)}")
    if process.returncode:
        kind = ConfigError if process.returncode == BAD_INPUT else RuntimeError
        text = log_path.read_text(errors="replace", encoding="utf-8")
        lines = ["it printed nothing", *filter(str.strip, text.splitlines())]
        page = lines.pop() if lines[-1].startswith(PAGE) else ""
        line = lines[-1].removeprefix("failed: ").removeprefix("error: ")
        error = kind(f"{title}: {line}; its log is {log_path}")
        if page:
            error.add_note(page)
        raise error
