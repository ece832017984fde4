"""An algorithm is a row of this table, not a trainer. Torch-free, so that configuration can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Truncated = Literal["zero", "mask"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Names of functions in `advantages.py` and `losses.py`, and what they need.

    truncated: what an episode cut by the horizon or the context counts as. `zero`: its reward so far (0 for an outcome
    reward), so that being too slow is a failure; `mask`: it leaves the loss and the group statistics.
    """

    advantages: str
    policy_loss: str
    aggregation: Literal["token", "sequence"]
    needs_groups: bool
    truncated: Truncated


RECIPES: dict[str, Recipe] = {
    # DeepSeekMath, arXiv:2402.03300; token-mean over the global batch as in DAPO, arXiv:2503.14476
    "grpo": Recipe("grpo", "clip", "token", needs_groups=True, truncated="zero"),
}
