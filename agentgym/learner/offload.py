"""Host memory for optimizer state, which a forward does not need."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.learner.process_group import ProcessGroup


class HostMemory:
    """Tensors whose values stay in host memory until they are used.

    Meanwhile such a tensor keeps its shape but no storage. For a GPU the host memory is pinned, so
    that copies run at the speed of the bus.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._hosts: dict[Tensor, Tensor] = {}

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """Return the host's values of a tensor, sharded like it."""
        return self._hosts[tensor]

    @torch.no_grad()
    def put(self, tensor: Tensor) -> None:
        """Move a tensor's values to the host."""
        if tensor not in self._hosts:
            self._hosts[tensor] = torch.empty_like(
                tensor.detach(), device="cpu", pin_memory=tensor.is_cuda
            )
        local = self._ranks.own(tensor)
        self._ranks.own(self._hosts[tensor]).copy_(local)
        local.untyped_storage().resize_(0)

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> None:
        """Move a tensor's values back to its device."""
        local, host = self._ranks.own(tensor), self._ranks.own(self._hosts[tensor])
        local.untyped_storage().resize_(local.numel() * local.element_size())
        local.copy_(host, non_blocking=True)
