"""Models without memory for their parameters: built first, spread over processes, then filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentgym.models.architecture import read_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# weights that are replaced anyway; to draw them on the meta device takes longer than all else
_DRAWS = {"torch.nn.init", "transformers.initialization"}
_DRAWN = re.compile(r"(trunc_|kaiming_|xavier_)?(normal|uniform)_")


class _NothingAllocated(TorchFunctionMode):
    """Where a layer asks for memory to initialize, it gets none, and nothing is drawn; what it
    computes, such as the frequencies of a rotary embedding, is there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif getattr(func, "__module__", "") in _DRAWS and _DRAWN.fullmatch(func.__name__):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def empty_model(architecture: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a config.json text, its parameters on the meta device.
    Errors: ValueError where it is not supported here.
    """
    from agentgym.models.model import from_config

    with _NothingAllocated():
        model = from_config(read_architecture(architecture), dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{type(model).__name__} does not compute its buffer {name}")
    change_parameters(model, lambda each: each.to("meta"))
    return model.eval()


def materialize(module: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that have none, with any values in it."""
    change_parameters(
        module, lambda each: torch.empty_like(each, device=device) if each.is_meta else each
    )


def change_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters by what becomes of them; one that several layers share stays shared."""
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        for name, old in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in changed:
                held = old.detach()
                new = change(held)
                changed[old] = old if new is held else nn.Parameter(new, old.requires_grad)
            setattr(layer, name, changed[old])
