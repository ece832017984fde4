"""LoRA adapters: low-rank matrices trained on top of the frozen weights of another commit.

The layers and the export format are peft's.
Engines get either merged weights, always computed from the frozen ones, or only the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentgym.config import ConfigError, LoraConfig
from agentgym.models.model import empty_model, weights_of
from agentgym.models.networks import blocks
from agentgym.models.tensorfiles import StoredTensor, StoredTensors, pieces_of
from agentgym.models.transport import write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"  # name of the adapter within peft's layers, which may have several
DOWN, UP = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"  # [rank, in], [out, rank]
FROZEN = ".base_layer."  # in the name of an adapted layer's own parameters


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: references to the frozen weights and to its matrices, if they are stored."""

    base: StoredTensors  # the frozen weights
    rank: int
    alpha: int
    target_modules: tuple[str, ...]  # names of linear layers, or their ends
    seed: int = 0  # of new matrices
    stored: StoredTensors | None = None  # the matrices; None: new ones
    alone: bool = False  # True: publish only the matrices to engines; else merged weights

    @property
    def scale(self) -> float:
        """Factor with which the product of a layer's two matrices is added to its frozen weight."""
        return self.alpha / self.rank

    @property
    def policy(self) -> StoredTensors:
        """References to the merged weights; to the frozen ones if no matrices are stored."""
        if (stored := self.stored) is None:
            return self.base
        return MergedTensors(stored.place, stored.manifest, stored.files, self.base, self.scale)

    def inject(self, model: PreTrainedModel) -> None:
        """Replace the target layers of a model on the meta device by peft's, in place. Only the
        matrices are trained; they are float32 for any dtype of the weights.
        """
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        model.requires_grad_(False)
        config = PeftConfig(**self.settings)
        inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        for layer in _layers(model):
            for matrices in (layer.lora_A, layer.lora_B):
                matrices.float().requires_grad_(True)

    def shapes(self, architecture: str) -> dict[str, Tensor]:
        """Return name -> matrix on the meta device. architecture: the model's config.json text."""
        model = empty_model(architecture)
        self.inject(model)
        return {name: tensor for name, tensor in weights_of(model).items() if is_matrix(name)}

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for peft's LoraConfig."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": sorted(self.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }

    def new_matrices(self, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, new float32 values) for each matrix of `like`, in order of names. `lora_A`
        is drawn from the seed, distributed as in peft; `lora_B` is zero, so nothing changes yet.
        """
        draw = torch.Generator().manual_seed(self.seed)
        for name in sorted(like):
            values = torch.zeros(like[name].shape)
            if name.endswith(DOWN):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=draw)
            yield name, values


def chosen_modules(model: PreTrainedModel, lora: LoraConfig) -> tuple[str, ...]:
    """Return the ends of the names of the layers that get an adapter, sorted, for example "q_proj":
    `lora.target_modules`, or if that is empty all linear layers of the blocks.
    Errors: ConfigError for a name of anything else, or for a layer narrower than the rank.
    """
    inside = {layer for block in blocks(model) for layer in block.modules()}
    modules = dict(model.named_modules())
    linear = {
        name: module
        for name, module in modules.items()
        if module in inside and isinstance(module, nn.Linear)
    }
    ends = sorted({name.rpartition(".")[2] for name in linear})
    chosen = tuple(sorted(lora.target_modules)) or tuple(ends)
    for end in chosen:
        matching = [name for name in modules if f".{name}".endswith(f".{end}")]
        others = [name for name in matching if name not in linear]
        if others or not matching:
            raise ConfigError(
                f"lora.target_modules {end!r} names {', '.join(others[:3]) or 'nothing'} in"
                f" {type(model).__name__}; expected linear layers of its blocks:"
                f" {', '.join(ends) or 'it has none'}"
            )
        for name in matching:
            width = min(linear[name].in_features, linear[name].out_features)
            if lora.rank > width:
                raise ConfigError(
                    f"lora.rank {lora.rank} is above the width {width} of {name}; lower it, or"
                    " leave that layer out of lora.target_modules"
                )
    return chosen


def is_matrix(name: str) -> bool:
    """Return True for a LoRA matrix (the trained parameters)."""
    return name.endswith((DOWN, UP))


def plain_name(name: str) -> str:
    """Name of a frozen parameter in the model without an adapter."""
    return name.replace(FROZEN, ".")


def write_adapter(
    folder: Path,
    settings: Mapping[str, Any],
    matrices: Mapping[str, Tensor],
    base_name: str | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does; vLLM loads them, too.
    settings: `Adapter.settings`; base_name: of the base model, None if no name can load it.
    """
    from peft import LoraConfig as PeftConfig

    config = PeftConfig(**settings, base_model_name_or_path=base_name, inference_mode=True)
    config.save_pretrained(str(folder))
    named = {
        f"base_model.model.{name.removesuffix(f'.{NAME}.weight')}.weight": matrix
        for name, matrix in matrices.items()
    }
    write_weights(folder / "adapter_model.safetensors", named)


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Merge rows [n, in] of a frozen weight with down [rank, in] and up [n, rank], in float32.
    Result: [n, in] in the weight's dtype.
    """
    return (weight.float() + (up.float() @ down.float()) * scale).to(weight.dtype)


def merged_weights(
    parameters: Mapping[str, Tensor],
    scale: float,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of the merged model's parameters, in new memory if an adapter changes
    them. parameters: of the adapted model; whole: gathers a parameter that is split over ranks.
    """
    for name, part in parameters.items():
        if is_matrix(name):
            continue
        layer, _, kind = name.rpartition(FROZEN)
        tensor = whole(part)
        if kind == "weight":
            down, up = (whole(parameters[layer + end]) for end in (DOWN, UP))
            tensor = merged(tensor, down, up, scale)
        yield plain_name(name), tensor


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapter off in a block: it computes with its frozen weights alone."""
    layers = _layers(model)
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def _layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@dataclass(frozen=True)
class MergedTensors(StoredTensors):
    """Weights of a policy that is stored as an adapter; they are merged while reading."""

    base: StoredTensors
    scale: float

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.place, self.manifest, self.files, self.base, self.scale)

    @cached_property
    def matrices(self) -> StoredTensors:
        return StoredTensors(self.place, self.manifest, self.files)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.base.tensors

    @property
    def size(self) -> int:
        return self.matrices.size + self.base.size

    def verify(self, rank: int = 0, size: int = 1) -> None:
        self.base.verify(rank, size)
        self.matrices.verify(rank, size)

    def read(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        self.base.read(name, rows, first_row)
        layer = name.removesuffix(".weight")
        stored = self.matrices.tensors
        if layer + DOWN not in stored:
            return
        down = rows.new_empty(stored[layer + DOWN].shape, dtype=stored[layer + DOWN].dtype)
        up = down.new_empty(len(rows), len(down))
        self.matrices.read(layer + DOWN, down)
        self.matrices.read(layer + UP, up, first_row)
        rows.copy_(merged(rows, down, up, self.scale))

    def pieces(self, name: str) -> Iterator[memoryview]:
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(name, whole)
        return pieces_of(whole)
