"""Several processes that hold the weights together.

A module of its own, so that a single process does not pay for its imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future

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
        has is in the file of one of them. Errors: ValueError for a tensor not split by rows.
        """
        copied = _Copied()
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        with _plain_errors():
            save(dict(tensors), storage_writer=copied, planner=planner)
        return {file_name(name, self.rank, self.size): TensorFile(copied.parts)}

    def copy(self, tensor: Tensor, whole: Tensor) -> None:
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        tensor.copy_(whole)

    def load(self, tensors: Mapping[str, Tensor], stored: StoredTensors) -> None:
        """Load this rank's rows in place; torch.distributed.checkpoint computes which they are."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _plain_errors():
            load(
                dict(tensors), storage_reader=_Stored(stored, self.rank, self.size), planner=planner
            )


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Replace torch's CheckpointException by the error of the lowest rank that failed. Torch raises
    the exception on every rank, so all ranks raise the same error.
    """
    try:
        yield
    except CheckpointException as failed:
        raise failed.failures[min(failed.failures)][0] from None


class _Copied(StorageWriter):
    """Storage writer that only copies this rank's share of the plan into memory."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            assert item.tensor_data is not None
            name, chunk, shape = item.index.fqn, item.tensor_data.chunk, item.tensor_data.size
            if name in self.parts or tuple(chunk.sizes[1:]) != tuple(shape[1:]):
                raise ValueError(f"{name} is spread in another way than by rows")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            copied = tensor.detach().to("cpu", copy=True)
            self.parts[name] = Part(copied, tuple(shape), chunk.offsets[0] if shape else 0)
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class _Stored(StorageReader):
    """Storage reader for the rows of a commit's tensors."""

    def __init__(self, stored: StoredTensors, rank: int, size: int) -> None:
        self._stored, self._rank, self._size = stored, rank, size

    def reset(self, checkpoint_id: object = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: dict[str, TensorStorageMetadata] = {}
        for name, tensor in self._stored.tensors.items():
            chunks = [
                ChunkStorageMetadata(
                    offsets=torch.Size([part.first_row, *[0] * (len(tensor.shape) - 1)]),
                    sizes=torch.Size([part.num_rows, *tensor.shape[1:]]),
                )
                if tensor.shape
                else ChunkStorageMetadata(offsets=torch.Size(), sizes=torch.Size())
                for part in tensor.parts
                if part.num_rows or not tensor.shape[0]
            ]
            metadata[name] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
            )
        return Metadata(state_dict_metadata=dict(metadata))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._stored.verify(self._rank, self._size)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            offset, within = item.storage_index.offset, item.storage_offsets
            first_row = offset[0] + within[0] if offset else 0
            self._stored.read(item.storage_index.fqn, target, first_row)
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
