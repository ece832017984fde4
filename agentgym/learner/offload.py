"""Host memory for what an optimizer keeps and a forward does not need."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.learner.process_group import ProcessGroup


class HostMemory:
    """Tensors whose values wait in host memory until they are used.

    Meanwhile such a tensor has its shape and no memory; on a GPU the host's is pinned, so that
    copies run at the speed of the bus.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._hosts: dict[Tensor, Tensor] = {}

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """Its values, spread as it is."""
        return self._hosts[tensor]

    @torch.no_grad()
    def put(self, tensor: Tensor) -> None:
        """Move its values to the host."""
        if tensor not in self._hosts:
            self._hosts[tensor] = torch.empty_like(
                tensor.detach(), device="cpu", pin_memory=tensor.is_cuda
            )
        own = self._ranks.own(tensor)
        self._ranks.own(self._hosts[tensor]).copy_(own)
        own.untyped_storage().resize_(0)

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> None:
        """Move them back."""
        own, host = self._ranks.own(tensor), self._ranks.own(self._hosts[tensor])
        own.untyped_storage().resize_(own.numel() * own.element_size())
        own.copy_(host, non_blocking=True)
