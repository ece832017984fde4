"""The settings of `alarms`: limits of measures while training, and the action beyond them.

They change no result, so you may change them between two starts of one run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat

from agentgym.config.section import Section, operational

# YAML reads a bare `off` as false
Action = Annotated[
    Literal["off", "warn", "stop"],
    BeforeValidator(lambda value: "off" if value is False else value),
]


def _action(trouble: str) -> Any:
    return operational("warn", f"{trouble}: off, warn, or stop after the next commit")


class AlarmsConfig(Section):
    """The action of each alarm and the limit of its measure: see docs/operations.md."""

    entropy: Action = _action("entropy collapse")
    min_entropy: NonNegativeFloat = operational(0.02, "nats per action token")
    gradient: Action = _action("gradient spike")
    max_gradient_factor: PositiveFloat = operational(20.0, "times the usual gradient norm")
    update_kl: Action = _action("update that moves the policy far")
    max_update_kl: PositiveFloat = operational(
        0.2, "nats per action token between the policy before an update and after"
    )
    zero_variance: Action = _action("groups that teach nothing")
    max_zero_variance_frac: float = operational(
        0.99, "share of the groups whose rewards are all equal", gt=0, le=1
    )
    success: Action = _action("success falls")
    max_success_drop: float = operational(
        0.2, "below the best success so far, as a share of the episodes", gt=0, le=1
    )
    no_success: Action = operational(
        "stop",
        "a stage begins with groups of equal rewards, and neither they nor the evaluation of the"
        " weights it begins with has a success: off, warn, or stop before the first update",
    )
    mismatch: Action = _action("engine and learner differ")
    max_mismatch_kl: PositiveFloat = operational(
        0.03, "nats per action token; algorithm.max_mismatch_kl ends a run whatever stands here"
    )
    throughput: Action = _action("throughput falls")
    min_throughput_frac: float = operational(0.5, "of the usual tokens per second", ge=0, lt=1)
