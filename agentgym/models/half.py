"""Half-precision linear layers on CPUs without instructions for half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

FEW_ROWS = 64
BLOCK_ROWS = 512  # of a weight


def has_fast_half() -> bool:
    """Return True if this CPU multiplies in half precision without emulation (it has AVX-512)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_emulated(tensor: Tensor) -> bool:
    """Return True for a half-precision tensor on a CPU without fast instructions for it."""
    return tensor.device.type == "cpu" and tensor.dtype.itemsize < 4 and not has_fast_half()


def widen_linear_layers(model: nn.Module) -> None:
    """Let a model's linear layers compute in float32 if the CPU has no fast half precision: change
    the class of each `nn.Linear` in place.
    This applies to weights of half precision on a CPU without AVX-512, on which torch's own kernel
    takes eight times as long. Weights and results keep their dtype. As in native kernels, products
    are summed in float32 and rounded once.
    """
    if has_fast_half():
        return
    for layer in [module for module in model.modules() if type(module) is nn.Linear]:
        layer.__class__ = _WideLayer


def keep_wide_weights(model: nn.Module) -> None:
    """Let widened linear layers keep a float32 copy of their weights, made at the next forward
    without gradients and used by all later ones.

    Call it again after every change of the weights. It is useful for a model that decodes:
    widening takes half the time of a forward of a few tokens. The copy takes twice the memory of
    the linear layers' own weights. It has no effect if `widen_linear_layers` has none.
    """
    for layer in model.modules():
        if isinstance(layer, _WideLayer):
            layer.keep()


class _WideLayer(nn.Linear):
    """A linear layer that computes in float32 if its weights are of half precision and on a CPU;
    otherwise it is a plain `nn.Linear`.

    `widen_linear_layers` makes it the class of existing layers. A new `forward` on each layer would
    refer to the layer, and such a cycle keeps the weights alive until the garbage collector runs.
    """

    _keeps = False
    _kept: tuple[Tensor, Tensor | None] | None = None

    def keep(self) -> None:
        self._keeps, self._kept = True, None

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the layer. hidden: [..., in]. Result: [..., out], in the dtype of `hidden`."""
        weight, bias = self.weight, self.bias
        if weight.device.type != "cpu" or weight.dtype.itemsize >= 4:
            return linear(hidden, weight, bias)
        if self._keeps and not torch.is_grad_enabled():
            if self._kept is None:
                self._kept = weight.float(), None if bias is None else bias.float()
            return _product(hidden.float(), *self._kept).to(hidden.dtype)
        result: Tensor = _WideLinear.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
        return result


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `linear(hidden, weight, bias)`, computed by blocks for few rows and a large weight.

    MKL first reorders the whole weight: a head of 49,152 x 576 with 16 rows takes 41 ms whole and
    27 ms by blocks, with results equal to the bit (two threads of an AMD EPYC).
    """
    rows = hidden.shape[:-1].numel()
    if bias is not None or not 1 < rows <= FEW_ROWS or len(weight) < 8 * BLOCK_ROWS:
        return linear(hidden, weight, bias)
    return torch.cat([linear(hidden, block) for block in torch.split(weight, BLOCK_ROWS)], -1)


class _WideLinear(Function):
    """Linear layer computed in float32; its result has the dtype of `hidden`.

    Inputs are kept for the backward in their own dtype. Autograd would keep float32 copies of
    weights (0.5 GiB for 135 million) and hidden states.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        wide = None if bias is None else bias.float()
        return linear(hidden.float(), weight.float(), wide).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].float()
        rows = grad.flatten(0, -2)
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_hidden = (grad @ weight.float()).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.T @ hidden.flatten(0, -2).float()).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_hidden, of_weight, of_bias
