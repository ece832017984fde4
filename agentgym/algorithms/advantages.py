"""Advantage functions: pure, tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def grpo_advantages(returns: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Standardise each return within its group.

    returns: [B] undiscounted outcome; group_ids: [B] int64, 0 .. G - 1. Result: [B].
    The deviation is the sample one (n - 1). A group whose returns are all equal gets zeros, and so does a group left
    with one member: there is nothing to compare it with.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    num_groups = int(group_ids.max()) + 1
    sizes = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(returns))
    means = torch.zeros(num_groups).index_add_(0, group_ids, returns) / sizes.clamp(min=1)
    centred = returns - means[group_ids]
    variances = torch.zeros(num_groups).index_add_(0, group_ids, centred**2) / (sizes - 1).clamp(min=1)
    advantages = centred / (variances.sqrt()[group_ids] + eps)
    low = torch.full((num_groups,), torch.inf).scatter_reduce(0, group_ids, returns, "amin")
    high = torch.full((num_groups,), -torch.inf).scatter_reduce(0, group_ids, returns, "amax")
    return torch.where((low == high)[group_ids], 0.0, advantages)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo_advantages}
