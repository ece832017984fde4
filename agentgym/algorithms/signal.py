"""Comparison of rewards: the one definition of equal rewards, which carry no signal.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REWARD_TOLERANCE = 1e-6  # a float32 sum of rewards keeps six digits; no environment pays less


def differ(low: Any, high: Any) -> Any:
    """Return True if high is above low by more than rounding.

    low, high: floats, or tensors of one shape; the result has their shape.
    The tolerance grows with the rewards, because their rounding does: for rewards up to 1 it is
    1e-6 to 3e-6.
    """
    return high - low > REWARD_TOLERANCE * (1 + abs(low) + abs(high))


def all_equal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group, at least one, are equal up to rounding."""
    return not differ(min(rewards), max(rewards))
