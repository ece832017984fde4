"""Interface of the processes that hold the weights.

Every rank is given the whole batch and takes its share of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from agentgym.models.model import materialize
from agentgym.models.tensorfiles import StoredTensors, TensorFile


class ProcessGroup(Protocol):
    """One process's view of all processes that train together.

    Every method but the properties is entered by all ranks or by none.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device:
        """Device of the weights, batches and losses."""
        ...

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters over the ranks, in place; gradients are summed, not averaged.

        Parameters on the meta device get memory, but no values.
        """
        ...

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of tensors of one shape, [...]."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the full tensor [F, ...]; `tensor` may be this rank's part [F / size, ...]."""
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a sharded tensor, [F / size, ...]."""
        ...

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        """Return a copy of this rank's share of the tensors, by `file_name`, in host memory."""
        ...

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        """Fill this rank's part of a sharded tensor, in place, from the whole tensor."""
        ...

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        """Fill this rank's parts, in place, from a store written by any number of ranks.

        Errors: DigestMismatch, BlobMissing.
        """
        ...


class SingleProcess:
    """A `ProcessGroup` of one process, which has all weights."""

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
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        return {name: TensorFile.of(copies)}

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        tensor.copy_(whole)

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        stored.fill(tensors)
