"""How many processes hold the weights.
Every rank is given the whole batch and takes its share of the sequences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class ProcessGroup(Protocol):
    """One process's view of all that train together.
    Every method but the properties is entered by all ranks or by none.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device:
        """Where the weights are, and so batches and losses."""
        ...

    def shard(self, module: nn.Module) -> None:
        """Spread the parameters over the ranks, in place; gradients are then summed over them,
        not averaged.
        """
        ...

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape: that shape, [...]."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor [F, ...] of which `tensor` [F / size, ...] may be this rank's part."""
        ...

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """The inverse of `whole` [F, ...]: this rank's part, laid out like `like`."""
        ...


class SingleProcess:
    """One process: nothing to share."""

    rank, size = 0, 1

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def shard(self, module: nn.Module) -> None:
        module.to(self.device)

    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole
