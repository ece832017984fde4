"""The processes that hold the weights. Each is given the whole batch and takes its share of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from agentgym.models.model import materialize
from agentgym.models.tensorfiles import StoredTensors, TensorFile


class ProcessGroup:
    """One process's view of all processes that train together; here it is the only one, and has
    all weights. `Sharded` is one of several.

    Every method is entered by all ranks or by none.
    """

    rank, size = 0, 1

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Make a group of one process. device: of the weights, batches and losses."""
        self.device = torch.device(device)

    def shard(self, module: nn.Module) -> None:
        """Move the module to the device and shard its parameters over the ranks, in place.
        Gradients are then summed over ranks, not averaged.
        Parameters on the meta device get memory, but no values.
        """
        materialize(module, self.device)
        module.to(self.device)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of tensors of one shape, [...]."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the full tensor [F, ...]; `tensor` may be this rank's part [F / size, ...]."""
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a sharded tensor, [F / size, ...]."""
        return tensor

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        """Return file name -> copy of this rank's share in host memory. name: see `file_name`."""
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        return {name: TensorFile.of(copies)}

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        """Fill this rank's part of a sharded tensor, in place, from the whole tensor."""
        tensor.copy_(whole)

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        """Fill this rank's parts, in place, from a store written by any number of ranks.

        Errors: DigestMismatch, BlobMissing.
        """
        stored.fill(tensors)
