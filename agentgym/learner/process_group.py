"""How many processes hold the weights.
Every rank is given the whole batch and takes its share of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from agentgym.models.empty import materialize
from agentgym.models.tensorfiles import StoredTensors, TensorFile


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
        not averaged. Those on the meta device get memory, and no values.
        """
        ...

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape: that shape, [...]."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor [F, ...] of which `tensor` [F / size, ...] may be this rank's part."""
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """What of a spread tensor is here [F / size, ...], without the others."""
        ...

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        """A copy in host memory of this rank's share of the tensors, as a file of that name."""
        ...

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        """Fill this rank's part of a spread tensor, in place, with that of one that all have."""
        ...

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        """Fill this rank's parts, in place, with what any number of ranks stored.
        Errors: DigestMismatch, BlobMissing.
        """
        ...


class SingleProcess:
    """One process: nothing to share."""

    rank, size = 0, 1

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def shard(self, module: nn.Module) -> None:
        materialize(module, self.device)
        module.to(self.device)

    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        copies = {key: each.detach().to("cpu", copy=True) for key, each in tensors.items()}
        return {name: TensorFile.of(copies)}

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        tensor.copy_(whole)

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        stored.fill(tensors)
