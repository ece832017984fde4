"""Half precision on processors without instructions for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def widen_linear_layers(model: nn.Module) -> None:
    """Let linear layers compute in float32 where the processor has no fast half precision.

    Applies to weights of half precision on a CPU without AVX-512; there torch's own kernel takes
    eight times as long. Weights and results keep their dtype. As in native kernels, products are
    summed in float32 and rounded once.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return
    linear_layers: list[nn.Module] = [each for each in model.modules() if type(each) is nn.Linear]
    for layer in linear_layers:
        layer.forward = _WideForward(layer)


def keep_wide_weights(model: nn.Module) -> None:
    """Widen each weight at its next use without gradients and keep the float32 copy.

    Call it again after every change of the weights. For a model that decodes: widening takes half
    of a forward of a few tokens. Memory: twice that of the linear layers' own weights.
    No effect where `widen_linear_layers` has none.
    """
    for layer in model.modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, _WideForward):
            forward.keep()


class _WideForward:
    """The forward of a linear layer, in float32 arithmetic."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._keeps = False
        self._kept: tuple[Tensor, Tensor | None] | None = None

    def keep(self) -> None:
        self._keeps, self._kept = True, None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in]. Result: [..., out], in the dtype of `hidden`."""
        weight, bias = self._layer.weight, self._layer.bias
        if weight.device.type != "cpu" or weight.dtype.itemsize >= 4:
            return linear(hidden, weight, bias)
        return linear(hidden.float(), *self._wide(weight, bias)).to(hidden.dtype)

    def _wide(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self._keeps or torch.is_grad_enabled():
            return weight.float(), None if bias is None else bias.float()
        if self._kept is None:
            self._kept = weight.float(), None if bias is None else bias.float()
        return self._kept
