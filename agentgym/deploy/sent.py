"""A run's configuration inside a job elsewhere, and the command that runs one step of it there.

As a program, this module writes the parameters from a variable to a file and becomes that command.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

import yaml

from agentgym.config import RunConfig, is_elsewhere
from agentgym.deploy.attempts import Job

PARAMS_VARIABLE = "AGENTGYM_PARAMS"
STATE = Path(".agentgym")  # on a machine that does not have our folders


def sent_config(cfg: RunConfig) -> RunConfig:
    """Return the run's configuration inside a job: it uses actors of the job's own cluster or, if
    every bit must repeat, the job's own process.

    Paths are absolute or, on a machine that does not have them, below its own state.
    """
    data, store = cfg.data, cfg.store
    if is_elsewhere(cfg):
        folder = STATE / "data" / data.digest[:16]
        data = data.model_copy(
            update={"path": folder / "lists", "trajectories": folder / "trajectories"}
        )
        store = store.model_copy(update={"path": STATE / "store"})
    else:
        here = {name: getattr(data, name).resolve() for name in ("path", "trajectories")}
        data = data.model_copy(update=here)
        store = store.model_copy(update={"path": store.path.resolve()})
    return cfg.model_copy(
        update={
            "compute": "inline" if cfg.deterministic else "ray",
            "ray": cfg.ray.model_copy(update={"address": "auto"}),
            "data": data,
            "store": store,
        }
    )


def arguments(job: Job) -> str:
    """Return the arguments of `agentgym step`, which refuses them if source, data or settings give
    another key.
    """
    return shlex.join((job.step, "--verbose", "--key", job.key))


def params_text(cfg: RunConfig) -> str:
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)


def main() -> None:
    """Write the parameters to a temporary file and become `agentgym step` with our arguments."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False, encoding="utf-8") as file:
        file.write(os.environ[PARAMS_VARIABLE])
    command = [sys.executable, "-m", "agentgym", "step", *sys.argv[1:], "--params", file.name]
    os.execv(sys.executable, command)  # noqa: S606 (the job's process must get the job's signals)


if __name__ == "__main__":
    main()
