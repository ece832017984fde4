"""Engines by name: the built-in ones, and those that installed packages offer under the entry point
group `agentgym.engines`; and the meter of their work. Other modules do not name engines.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, distributions, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from agentgym.config import ConfigError, RunConfig
from agentgym.trust import untrusted_python
from agentgym.types import EngineUsage, Policy

if TYPE_CHECKING:
    import torch

    from agentgym.models.adapter import Adapter
    from agentgym.models.checkpoint import Checkpoint
    from agentgym.models.fidelity import Tolerance, Tolerances

ENTRY_POINT_GROUP = "agentgym.engines"
BUILT_IN = {
    "torch": "agentgym.rollouts.policies.torch:TorchPolicy",
    "vllm": "agentgym.rollouts.policies.vllm:VllmPolicy",
}
PACKAGES = {"vllm": "vllm"}  # engine -> package it needs, not a dependency of ours
HOSTED = frozenset({"vllm"})  # engines with a process of their own, see `hosts.py`
INSTALL_VLLM = (
    "`make vllm` makes an environment with its CPU build, for rollout.engine_python"
    " .venv-vllm/bin/python; `pip install -e '.[vllm]'` in the checkout adds the CUDA build to this"
    " one"
)
VERSIONS = (
    "{name: found.version for name in sys.argv[1:]"
    " for found in list(importlib.metadata.distributions(name=name))[:1]}"
)
ASK_S = 60.0  # for another interpreter to list its packages
# adapters that work in vLLM 0.32, as tried: model_type of config.json, names of layers; and the
# values it accepts for max_lora_rank
VLLM_MODELS = frozenset({"qwen2"})
VLLM_LAYERS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class EngineClass(Policy, Protocol):
    """Interface of an engine's class, which its entry point names. Its instances are policies."""

    # True if a SampleKey and the weights determine a token, see `agentgym.rollouts.policies.torch`:
    # an audit then repeats the draw. If False, it can only compute how likely a token was.
    repeats_draws: ClassVar[bool]
    tolerances: ClassVar[Tolerances]

    @classmethod
    def open(cls, cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Self:
        """Open a policy on `cfg.compute_device`; it takes over the checkpoint's model, not copied.
        num_slots: episodes at a time. version: number of the checkpoint's weights.
        If the checkpoint has an adapter, which it has only if `why_merged` allows that, only the
        adapter is published.
        """
        ...


def open_here(cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Policy:
    """Open the policy that `rollout.engine` names, in this process or its child processes.
    For the arguments see `EngineClass.open`. Errors: ConfigError; those of the engine.
    """
    chosen = engine_class(cfg.rollout.engine)
    if not hasattr(chosen, "usage"):
        raise ConfigError(
            f"rollout.engine {cfg.rollout.engine}: {chosen.__module__}:{chosen.__qualname__} has no"
            " method `usage`, which every engine has; return an `agentgym.types.EngineUsage`, an"
            " empty one if nothing is measured"
        )
    tolerance_of(cfg, checkpoint.dtype)
    return chosen.open(cfg, checkpoint, num_slots=num_slots, version=version)


def engine_class(name: str) -> type[EngineClass]:
    """Import and return the class of an engine. Errors: ConfigError if its name is unknown."""
    return cast(type[EngineClass], engine_entry(name).load())


def check_engine(cfg: RunConfig) -> None:
    """Raise ConfigError if the engine runs on this machine and its package is not installed."""
    package = PACKAGES.get(cfg.rollout.engine)
    elsewhere = cfg.compute in ("ray-job", "kuberay") or (cfg.compute == "ray" and cfg.ray.address)
    if package and not elsewhere and not installed(engine_python(cfg), package):
        where = f"in {cfg.rollout.engine_python}" if cfg.rollout.engine_python else "here"
        raise ConfigError(
            f"rollout.engine {cfg.rollout.engine} needs the package {package}, which is not"
            f" installed {where}; {INSTALL_VLLM}, or use rollout.engine torch"
        )


def engine_python(cfg: RunConfig) -> str:
    """Return the engine's interpreter: for a hosted engine of an inline run that of
    `rollout.engine_python`, if set; otherwise this process's. Errors: ConfigError if the one that
    is set is not trusted.
    """
    named = cfg.rollout.engine_python if cfg.rollout.engine in HOSTED else ""
    if not named or cfg.compute != "inline":
        return sys.executable
    if refused := untrusted_python(named, sys.prefix, os.environ):
        raise ConfigError(refused)
    return named


def installed(python: str, package: str) -> bool:
    """Return True if an interpreter finds a package. Errors: ConfigError if it does not run."""
    if python == sys.executable:
        return find_spec(package) is not None
    return bool(_asked(python, "importlib.util.find_spec(sys.argv[1]) is not None", package))


def versions_in(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return name -> version of those packages that an interpreter has. Errors: see `installed`."""
    if python != sys.executable:
        return dict(_asked(python, VERSIONS, *packages))
    lookups = ((name, next(iter(distributions(name=name)), None)) for name in packages)
    return {name: package.version for name, package in lookups if package}


@functools.cache
def _asked(python: str, expression: str, *arguments: str) -> Any:
    code = f"import importlib.metadata, importlib.util, json, sys; print(json.dumps({expression}))"
    try:
        process = subprocess.run(
            [python, "-c", code, *arguments], capture_output=True, check=True, timeout=ASK_S
        )
        return json.loads(process.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"rollout.engine_python {python} is no Python that runs here: {error}; name one such as"
            " .venv-vllm/bin/python, or leave it empty"
        ) from None


def start_timeout_s(cfg: RunConfig) -> float:
    """Seconds that vLLM may take to start after its process has started; 0 for other engines."""
    return cfg.vllm.start_timeout_s if cfg.rollout.engine == "vllm" else 0.0


def num_processes(cfg: RunConfig) -> int:
    """Number of one engine's processes; each takes part in a broadcast of weights."""
    return cfg.vllm.tensor_parallel_size if cfg.rollout.engine == "vllm" else 1


def why_merged(cfg: RunConfig, adapter: Adapter, architecture: str) -> str:
    """Return the reason why the engine needs merged weights; empty if it takes the adapter alone.
    architecture: config.json of the model.
    """
    engine, model = cfg.rollout.engine, json.loads(architecture)["model_type"]
    if engine != "vllm":
        return f"engine {engine} takes no adapter"
    if model not in VLLM_MODELS:
        return f"vLLM is not known to adapt a model of type {model}"
    if unknown := {name.rpartition(".")[2] for name in adapter.target_modules} - VLLM_LAYERS:
        return f"vLLM is not known to adapt {', '.join(sorted(unknown))}"
    if adapter.rank > VLLM_RANKS[-1]:
        return f"rank {adapter.rank} is above {VLLM_RANKS[-1]}, vLLM's largest"
    return ""


def engine_module(name: str) -> str:
    """Return the name of the module that implements an engine. Errors: ConfigError."""
    return engine_entry(name).module


def engine_dtype(cfg: RunConfig, weights: torch.dtype) -> torch.dtype:
    """Return the dtype in which the engine computes. weights: dtype of the weights, for `auto`."""
    import torch

    name = cfg.rollout.engine_dtype
    return weights if name == "auto" else cast(torch.dtype, getattr(torch, name))


def tolerance_of(cfg: RunConfig, weights: torch.dtype) -> Tolerance:
    """Return the engine's `Tolerance` for weights of a dtype. Errors: ConfigError without one."""
    name, dtype = cfg.rollout.engine, engine_dtype(cfg, weights)
    stated = engine_class(name).tolerances
    if dtype not in stated:
        raise ConfigError(
            f"engine {name!r} states no tolerance for weights of {dtype}, so the canary cannot"
            f" compare it with the learner; it has: {', '.join(map(str, stated))}"
        )
    return stated[dtype]


def engine_entry(name: str) -> EntryPoint:
    """Return the entry point of an engine. Errors: ConfigError if its name is unknown."""
    if name in BUILT_IN:  # searching all packages takes longer than a small batch
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP)
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in entries:
        known = {*entries, *BUILT_IN}
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; {hint}")
    return entries[name]


class Meter:
    """Meter of an engine's busy time, waiting requests and prompt tokens, for `EngineUsage`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._num_running = self._num_waiting = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._busy_s = 0.0
        self._depth_s: dict[int, float] = {}

    def requests(self, *, running: int, waiting: int) -> None:
        """Record the numbers of running and waiting requests from now on; call it at any change."""
        now = self._clock()
        elapsed_s, self._since = now - self._since, now
        if self._num_running:
            self._busy_s += elapsed_s
        self._depth_s[self._num_waiting] = self._depth_s.get(self._num_waiting, 0.0) + elapsed_s
        self._num_running, self._num_waiting = running, waiting

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count one prompt, whose first `num_cached` tokens had cached keys and values."""
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached

    def usage(self) -> EngineUsage:
        """Return the usage since the meter was made."""
        self.requests(running=self._num_running, waiting=self._num_waiting)
        return EngineUsage(
            self._prompt_tokens, self._cached_tokens, self._busy_s, dict(self._depth_s)
        )
