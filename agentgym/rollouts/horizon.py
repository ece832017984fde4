"""How many turns an episode may take at each optimiser step: the curriculum of ScalingInter."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from agentgym.config import HorizonConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of optimiser steps with one horizon."""

    index: int  # from 1
    max_turns: int
    first_step: int  # inclusive, from 1
    last_step: int  # inclusive

    @property
    def name(self) -> str:
        return f"stage-{self.index}"


def stages(config: HorizonConfig) -> tuple[Stage, ...]:
    """The stages in order; together they cover every optimiser step once."""
    ends = list(accumulate(config.stage_steps))
    return tuple(
        Stage(index + 1, turns, end - steps + 1, end)
        for index, (turns, steps, end) in enumerate(zip(config.max_turns, config.stage_steps, ends, strict=True))
    )


def max_turns(config: HorizonConfig, step: int) -> int:
    """The horizon at optimiser step 1, 2, ...: a pure function of the step, so that a resumed run cannot shift it.

    After the last stage its horizon stays. Source: ScalingInter-RL, arXiv:2509.08755.
    """
    if step < 1:
        raise ValueError(f"optimiser steps count from 1, got {step}")
    ends = list(accumulate(config.stage_steps))
    return config.max_turns[min(bisect_right(ends, step - 1), len(ends) - 1)]
