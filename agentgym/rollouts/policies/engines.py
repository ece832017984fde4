"""Engines by name: the built-in ones, and whatever installed packages offer under the entry point
group `agentgym.engines`. Nothing else names one.
"""

from __future__ import annotations

import difflib
import json
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, cast

from agentgym.config import ConfigError, RunConfig
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
INSTALL_VLLM = (
    "`make vllm` makes an environment with its CPU build, `pip install -e '.[vllm]'` in the"
    " checkout adds the CUDA build to this one"
)
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


def open_policy(cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Policy:
    """The policy that `rollout.engine` names. Errors: ConfigError; whatever the engine raises."""
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
    """That what samples can be loaded here, where that is here. Errors: ConfigError."""
    package = PACKAGES.get(cfg.rollout.engine)
    elsewhere = cfg.compute in ("ray-job", "kuberay") or (cfg.compute == "ray" and cfg.ray.address)
    if package and not elsewhere and find_spec(package) is None:
        raise ConfigError(
            f"rollout.engine {cfg.rollout.engine} needs the package {package}, which is not"
            f" installed here; {INSTALL_VLLM}, or use rollout.engine torch"
        )


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
