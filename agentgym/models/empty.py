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


# drawn weights are replaced anyway, and drawing on the meta device takes longer than all the rest
_DRAWS = {"torch.nn.init", "transformers.initialization"}
_DRAWN = re.compile(r"(trunc_|kaiming_|xavier_)?(normal|uniform)_")


class _NothingAllocated(TorchFunctionMode):
    """A mode in which `torch.empty` allocates on the meta device and initializers draw nothing.
    Computed tensors, such as the frequencies of a rotary embedding, are real.
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
    """Build the model of a config.json text with its parameters on the meta device.
    Errors: ValueError if the model is not supported.
    """
    from agentgym.models.model import from_config

    with _NothingAllocated():
        model = from_config(read_architecture(architecture), dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{type(model).__name__} does not compute its buffer {name}")
    change_parameters(model, lambda parameter: parameter.to("meta"))
    return model.eval()


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate memory, uninitialized, for the parameters that have none."""
    change_parameters(
        module,
        lambda parameter: (
            torch.empty_like(parameter, device=device) if parameter.is_meta else parameter
        ),
    )


def change_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter by its changed tensor; a parameter of several layers stays shared."""
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        for name, old in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in changed:
                detached = old.detach()
                new = change(detached)
                changed[old] = old if new is detached else nn.Parameter(new, old.requires_grad)
            setattr(layer, name, changed[old])
