"""Engines by name: the built-in ones, and whatever installed packages offer under the entry point
group `agentgym.engines`. Nothing else names one.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, distributions, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from agentgym.config import ConfigError, RunConfig
from agentgym.trust import untrusted_python
from agentgym.types import Policy

if TYPE_CHECKING:  # the table of steps asks for names alone
    import torch

    from agentgym.models.adapter import Adapter
    from agentgym.models.checkpoint import Checkpoint
    from agentgym.models.tolerance import Tolerance, Tolerances

ENTRY_POINT_GROUP = "agentgym.engines"
BUILT_IN = {
    "torch": "agentgym.rollouts.policies.torch:TorchPolicy",
    "vllm": "agentgym.rollouts.policies.vllm:VllmPolicy",
}
PACKAGES = {"vllm": "vllm"}  # engine -> what it needs beside this package's own dependencies
HOSTED = frozenset({"vllm"})  # engines that live in a process of their own, see `hosts.py`
INSTALL_VLLM = (
    "`make vllm` makes an environment with its CPU build, for rollout.engine_python"
    " .venv-vllm/bin/python; `pip install -e '.[vllm]'` in the checkout adds the CUDA build to this"
    " one"
)
VERSIONS = (
    "{name: found.version for name in sys.argv[1:]"
    " for found in list(importlib.metadata.distributions(name=name))[:1]}"
)
ASK_S = 60.0  # for another interpreter to say what it has
# what vLLM 0.32 was seen to adapt: models by the model_type of their config.json, and their layers;
# and the ranks that it may make room for
VLLM_MODELS = frozenset({"qwen2"})
VLLM_LAYERS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class EngineClass(Policy, Protocol):
    """What an entry point names: a class whose objects are policies."""

    # A SampleKey and the weights determine a token, as `agentgym.rollouts.policies.draw` says, so
    # an audit can tell a draw from a choice. Of an engine without this, an audit can say how likely
    # a token was, and no more.
    repeats_draws: ClassVar[bool]
    tolerances: ClassVar[Tolerances]

    @classmethod
    def open(cls, cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Self:
        """It samples with the checkpoint's model, its own from here on, on
        `cfg.compute_device`; num_slots: episodes at a time. The checkpoint has an adapter where
        `why_merged` allows it: this alone is then published.
        """
        ...


def open_here(cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Policy:
    """The policy that `rollout.engine` names, in this process or below it.
    Errors: ConfigError; whatever the engine raises.
    """
    chosen = engine_class(cfg.rollout.engine)
    if not hasattr(chosen, "usage"):
        raise ConfigError(
            f"rollout.engine {cfg.rollout.engine}: {chosen.__module__}:{chosen.__qualname__} has no"
            " method `usage`, which every engine has; return an `agentgym.types.EngineUsage`, an"
            " empty one where nothing is measured"
        )
    tolerance_of(cfg, checkpoint.dtype)
    return chosen.open(cfg, checkpoint, num_slots=num_slots, version=version)


def engine_class(name: str) -> type[EngineClass]:
    """Errors: ConfigError."""
    return cast(type[EngineClass], _entry(name).load())


def check_engine(cfg: RunConfig) -> None:
    """Raise ConfigError unless what samples here is installed."""
    package = PACKAGES.get(cfg.rollout.engine)
    elsewhere = cfg.compute in ("ray-job", "kuberay") or (cfg.compute == "ray" and cfg.ray.address)
    if package and not elsewhere and not installed(engine_python(cfg), package):
        where = cfg.rollout.engine_python or "here"
        raise ConfigError(
            f"rollout.engine {cfg.rollout.engine} needs the package {package}, which is not"
            f" installed {'in ' if where != 'here' else ''}{where}; {INSTALL_VLLM}, or use"
            " rollout.engine torch"
        )


def engine_python(cfg: RunConfig) -> str:
    """The interpreter that runs a hosted engine; Ray's workers have engines of their own.
    Errors: ConfigError.
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
    found: bool = _asked(python, "importlib.util.find_spec(sys.argv[1]) is not None", package)
    return found


def versions_in(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that an interpreter has. Errors: as `installed`."""
    if python == sys.executable:
        return _versions(packages)
    found: dict[str, str] = _asked(python, VERSIONS, *packages)
    return found


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = ((name, next(iter(distributions(name=name)), None)) for name in names)
    return {name: each.version for name, each in found if each}


@functools.cache
def _asked(python: str, expression: str, *arguments: str) -> Any:
    code = f"import importlib.metadata, importlib.util, json, sys; print(json.dumps({expression}))"
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments],
            capture_output=True,
            check=True,
            timeout=ASK_S,
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"rollout.engine_python {python} is no Python that runs here: {error}; name one such as"
            " .venv-vllm/bin/python, or leave it empty"
        ) from None


def engine_entry(name: str) -> str:
    """MODULE:CLASS of an engine. Errors: ConfigError."""
    return _entry(name).value


def start_timeout_s(cfg: RunConfig) -> float:
    """Seconds that an engine may take to start, beyond those of the process it is in."""
    return cfg.vllm.start_timeout_s if cfg.rollout.engine == "vllm" else 0.0


def num_processes(cfg: RunConfig) -> int:
    """Of one engine: so many take weights of a broadcast."""
    return cfg.vllm.tensor_parallel_size if cfg.rollout.engine == "vllm" else 1


def why_merged(cfg: RunConfig, adapter: Adapter, architecture: str) -> str:
    """Why the engine is published merged weights; empty: it takes the adapter alone.
    architecture: config.json of the model.
    """
    engine, model = cfg.rollout.engine, json.loads(architecture)["model_type"]
    if engine != "vllm":
        return f"engine {engine} takes no adapter"
    if model not in VLLM_MODELS:
        return f"vLLM is not known to adapt a model of type {model}"
    if odd := {name.rpartition(".")[2] for name in adapter.target_modules} - VLLM_LAYERS:
        return f"vLLM is not known to adapt {', '.join(sorted(odd))}"
    if adapter.rank > VLLM_RANKS[-1]:
        return f"rank {adapter.rank} is above {VLLM_RANKS[-1]}, vLLM's largest"
    return ""


def engine_module(name: str) -> str:
    """The module whose source computes what it samples. Errors: ConfigError."""
    return _entry(name).module


def engine_dtype(cfg: RunConfig, weights: torch.dtype) -> torch.dtype:
    """In which the engine computes with weights of this one."""
    import torch

    name = cfg.rollout.engine_dtype
    return weights if name == "auto" else cast(torch.dtype, getattr(torch, name))


def tolerance_of(cfg: RunConfig, weights: torch.dtype) -> Tolerance:
    """Errors: ConfigError where the engine states none for weights of this dtype."""
    name, dtype = cfg.rollout.engine, engine_dtype(cfg, weights)
    stated = engine_class(name).tolerances
    if dtype not in stated:
        raise ConfigError(
            f"engine {name!r} states no tolerance for weights of {dtype}, so nobody could tell"
            f" whether it samples from the learner's; it has: {', '.join(map(str, stated))}"
        )
    return stated[dtype]


def _entry(name: str) -> EntryPoint:
    if name in BUILT_IN:  # to look through all that is installed takes longer than a small batch
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP)
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        known = {*found, *BUILT_IN}
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"rollout.engine: unknown engine {name!r}; {hint}")
    return found[name]
