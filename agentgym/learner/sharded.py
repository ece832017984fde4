"""Several processes that hold the weights together.
Apart from `ranks.py`: one process need not pay for the import.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Sharded:
    """The `ProcessGroup` of processes that joined `torch.distributed`, each holding a part of every
    parameter (FSDP2).
    """

    def __init__(self, device: torch.device) -> None:
        """Entered by every process once its group is there: gloo for CPUs, NCCL for CUDA
        devices.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._mesh = init_device_mesh(device.type, (self.size,))

    def shard(self, module: nn.Module) -> None:
        module.to(self.device)
        # of sums over ranks, whatever the weights'
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        # of a decoder
        for layers in [each for each in module.modules() if isinstance(each, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=self._mesh, mp_policy=precision)
        fully_shard(module, mesh=self._mesh, mp_policy=precision)
        for each in module.modules():
            if isinstance(each, FSDPModule):
                # the denominators of our losses are global already
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def all_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        assert isinstance(like, DTensor)
        # every rank has the whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
