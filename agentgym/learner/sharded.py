"""Several processes that hold the weights together.

A module of its own, so that a single process does not pay for its imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from agentgym.learner.process_group import ProcessGroup
from agentgym.models.architecture import file_name
from agentgym.models.model import materialize
from agentgym.models.networks import blocks
from agentgym.models.tensorfiles import Part, StoredTensors, TensorFile

T = TypeVar("T")


class Sharded(ProcessGroup):
    """One of several processes of `torch.distributed`, with a part of every parameter (FSDP2)."""

    def __init__(self, device: torch.device) -> None:
        """Set up the device mesh. Call it in every process, after `dist.init_process_group` with
        gloo for CPUs, NCCL for CUDA.
        """
        super().__init__(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._mesh = init_device_mesh(device.type, (self.size,))

    def shard(self, module: nn.Module) -> None:
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(self.device)
        # sums over ranks are float32 for weights of any dtype
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in blocks(module):
            fully_shard(block, mesh=self._mesh, mp_policy=precision)
        fully_shard(module, mesh=self._mesh, mp_policy=precision)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # the denominators of our losses are already global
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
        materialize(module, self.device)  # allocates only this rank's parts
        module.to(self.device)  # also makes FSDP2 update its references to the parameters

    def all_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        """Return file name -> copy of this rank's share in host memory. A tensor that every rank
        has is in the file of the first one. Errors: ValueError for a tensor not split by rows.
        """

        def copied() -> TensorFile:
            parts: dict[str, Part] = {}
            for key, tensor in tensors.items():
                rows, first_row = self.own(tensor.detach()), self._first_row(tensor)
                if rows.shape[1:] != tensor.shape[1:]:
                    raise ValueError(f"{key} is spread in another way than by rows")
                # of several ranks without a row, the lowest one records that
                if self.rank == 0 or first_row > self._first_row(tensor, self.rank - 1):
                    parts[key] = Part(rows.to("cpu", copy=True), tuple(tensor.shape), first_row)
            return TensorFile(parts)

        return {file_name(name, self.rank, self.size): self._together(copied)}

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        tensor.copy_(whole)

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        def read() -> None:
            for name, tensor in tensors.items():
                stored.read(name, self.own(tensor.detach()), self._first_row(tensor))

        self._together(lambda: stored.verify(self.rank, self.size))
        self._together(read)

    def _first_row(self, tensor: Tensor, rank: int | None = None) -> int:
        """Return the index of a rank's first row, as FSDP2 and `torch.chunk` split; 0 if every rank
        has the whole tensor. rank: None for this one.
        """
        if not isinstance(tensor, DTensor):
            return 0
        rank = self.rank if rank is None else rank
        return min(rank * -(-len(tensor) // self.size), len(tensor))

    def _together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. If it fails on a rank, every rank raises the error of the
        lowest one that failed: the others would wait for it in their next exchange.
        """
        error = None
        try:
            result = work()
        except Exception as failure:
            error = failure
        errors: list[Exception | None] = [None] * self.size
        dist.all_gather_object(errors, error)
        for raised in filter(None, errors):
            raise raised from None
        return result
