"""The blocks of a network: what is spread, computed again and compiled one by one."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agentgym.models.attention import leave_uncompiled


def blocks(network: nn.Module) -> list[nn.Module]:
    """Of a decoder, in order."""
    lists = [each for each in network.modules() if isinstance(each, nn.ModuleList)]
    return [block for each in lists for block in each]


def compile_blocks(network: nn.Module, backend: str) -> None:
    """Compile each block at its first forward, for any number of tokens.
    Before the network is spread over ranks: what gathers its weights stays outside.
    """
    leave_uncompiled()
    for block in blocks(network):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def checkpoint_blocks(network: nn.Module) -> None:
    """Keep of each block its input alone, and compute its inside again in the backward.
    After `compile_blocks`. There is no dropout, so no random number is drawn twice.
    """
    for block in blocks(network):
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
