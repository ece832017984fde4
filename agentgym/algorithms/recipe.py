"""An algorithm is a row of this table, not a trainer.
Torch-free, so that configuration can be checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Truncated = Literal["zero", "mask", "bootstrap"]
Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
Loop = Literal["rl", "sft", "dpo", "evolve"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The name of a function in `advantages.py`, how its loss is shaped, and what it needs.

    truncated: what an episode cut by the horizon, the context or the simulator's own step limit
    counts as.
    `zero`: its reward so far (0 for an outcome reward), so that being too slow is a failure;
    `mask`: it leaves the loss and the group statistics; `bootstrap`: the critic's value of the
    state it was cut in stands for what would have come: the state after the last observation, or
    where that did not fit into the context, the state the last action token was chosen in.
    `zero` is the default of every row, PPO's too: runs are judged at a horizon, and a policy whose
    delays cost nothing learns to delay.
    kl_estimator, kl_place: of the penalty against the reference model, where `algorithm.kl_coef` is
    above 0.
    loop: what a stage does.
    `rl` samples for every optimizer step; the others have no advantages and learn from a set that
    is fixed at the start of the stage: demonstrations, pairs, or successes beside demonstrations.
    """

    advantages: str
    aggregation: Aggregation
    needs_groups: bool
    truncated: Truncated = "zero"
    needs_critic: bool = False
    dual_clip: bool = False
    kl_estimator: KlEstimator = "k3"
    kl_place: KlPlace = "loss"
    # groups of equal rewards are replaced by groups of further items
    dynamic_sampling: bool = False
    overlong: bool = False  # episodes near the end of their budget are penalized
    loop: Loop = "rl"

    @property
    def standardises_groups(self) -> bool:
        """Whether each group's returns are divided by their own deviation, whatever little they
        differ by.
        """
        return self.advantages == "grpo"


RECIPES: dict[str, Recipe] = {
    # DeepSeekMath, arXiv:2402.03300; token-mean over the global batch as in DAPO, arXiv:2503.14476
    "grpo": Recipe("grpo", "token", needs_groups=True),
    # arXiv:2503.20783: no division by a deviation, none by a length
    "dr_grpo": Recipe("dr_grpo", "constant", needs_groups=True),
    # arXiv:2503.14476
    "dapo": Recipe("grpo", "token", needs_groups=True, dynamic_sampling=True, overlong=True),
    # arXiv:2402.14740; its KL belongs to the reward
    "rloo": Recipe("rloo", "token", needs_groups=True, kl_estimator="k1", kl_place="reward"),
    # arXiv:2501.03262
    "reinforce++": Recipe(
        "reinforce++", "token", needs_groups=False, kl_estimator="k1", kl_place="reward"
    ),
    "reinforce++-baseline": Recipe(
        "reinforce++-baseline", "token", needs_groups=True, kl_estimator="k2"
    ),
    # arXiv:1707.06347, GAE arXiv:1506.02438, dual clip arXiv:1912.09729
    "ppo": Recipe(
        "gae",
        "token",
        needs_groups=False,
        needs_critic=True,
        dual_clip=True,
        kl_estimator="k1",
        kl_place="reward",
    ),
    # supervised learning on the demonstrations, continued: what further imitation alone would give
    "sft": Recipe("", "token", needs_groups=False, loop="sft"),
    # arXiv:2305.18290, pairs of trajectories of one item as in ETO, arXiv:2403.02502
    "dpo": Recipe("", "sequence", needs_groups=True, loop="dpo"),
    # arXiv:2406.04151
    "agent_evol": Recipe("", "token", needs_groups=False, loop="evolve"),
}
