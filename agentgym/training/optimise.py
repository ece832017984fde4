"""Weights, their optimiser and its schedule, kept together."""

from __future__ import annotations

import math

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from agentgym.config import OptimiserConfig
from agentgym.training.ranks import Ranks


def learning_rate(config: OptimiserConfig, step: int, total_steps: int) -> float:
    """The rate at optimiser step 1 .. total_steps: a pure function of the step, never 0 at the first update."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


class Optimised:
    """The parameters of one network under AdamW. Blobs hold whole tensors by name, whatever the number of ranks."""

    def __init__(self, network: nn.Module, config: OptimiserConfig, *, total_steps: int, ranks: Ranks) -> None:
        """network: already spread over the ranks."""
        self._network, self._config, self._total_steps, self._ranks = network, config, total_steps, ranks
        self._optimiser = torch.optim.AdamW(network.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)

    def rate(self, step: int) -> float:
        return learning_rate(self._config, step, self._total_steps)

    def zero_grad(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)

    def apply(self, step: int, loss: float) -> float:
        """Clip, check and take one step. Result: the gradient's norm before clipping.

        Errors: FloatingPointError where loss or gradient is not finite; the weights are then unchanged.
        """
        norm = float(self._ranks.whole(nn.utils.clip_grad_norm_(self._network.parameters(), self._config.grad_clip)))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise FloatingPointError(f"loss {loss} with gradient norm {norm} is not finite; the weights were not changed")
        for group in self._optimiser.param_groups:
            group["lr"] = self.rate(step)
        self._optimiser.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Whole parameters by name, detached; a tied tensor appears once, under the name that owns it."""
        return {name: self._ranks.whole(parameter.detach()) for name, parameter in self._network.named_parameters()}

    def weights_blob(self) -> bytes:
        """Safetensors bytes; equal weights give equal bytes."""
        return bytes(save_safetensors({name: tensor.cpu().contiguous() for name, tensor in self.weights().items()}))

    def state_blob(self) -> bytes:
        """The optimiser's state as safetensors, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._network.named_parameters():
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"{name}:{key}"] = self._ranks.whole(value).cpu().contiguous()
        return bytes(save_safetensors(tensors))

    def load_state(self, blob: bytes) -> None:
        """The inverse of `state_blob`, for a network of the same parameters."""
        parameters = dict(self._network.named_parameters())
        for entry, whole in load_safetensors(blob).items():
            name, _, key = entry.rpartition(":")
            parameter = parameters[name]
            part = whole if whole.ndim == 0 else self._ranks.part(whole.to(parameter.device), parameter)
            self._optimiser.state[parameter][key] = part
