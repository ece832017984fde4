"""The blocks of a network: the units of sharding, of recomputation and of compilation."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agentgym.models.attention import leave_uncompiled


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return a decoder's blocks, in order: the items of all its ModuleLists."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return [block for module_list in lists for block in module_list]


def compile_blocks(network: nn.Module, backend: str) -> None:
    """Compile each block at its first forward, for any number of tokens.
    Call it before sharding, so that the gathering of weights is not compiled.
    """
    leave_uncompiled()
    for block in blocks(network):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def checkpoint_blocks(network: nn.Module) -> None:
    """Store only each block's input and recompute its activations in the backward.
    Call it after `compile_blocks`. There is no dropout, so no random number is drawn twice.
    """
    for block in blocks(network):
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
