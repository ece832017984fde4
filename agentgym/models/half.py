"""Half precision on processors without instructions for it."""

from __future__ import annotations

from functools import partial
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
        layer.forward = partial(_forward, layer)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """Multiply in float32.

    hidden: [..., in]. Result: [..., out], in the dtype of `hidden`."""
    weight, bias = layer.weight, layer.bias
    if weight.device.type != "cpu" or weight.dtype.itemsize >= 4:
        return linear(hidden, weight, bias)
    wide = linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(hidden.dtype)
