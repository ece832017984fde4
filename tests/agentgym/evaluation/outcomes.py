"""Results made of tables of outcomes."""

import math

from agentgym.evaluation.result import Outcome, Result, Slot

NAN = float("nan")


def result_of(greedy, samples, families=None, envs=None):
    """A result of three turns an episode. greedy: [I], samples: [I, n], NaN where one failed."""
    slots = []
    for row, (one, others) in enumerate(zip(greedy, samples, strict=True)):
        env = envs[row] if envs else "babyai"
        for sample, success in enumerate((one, *others)):
            slots.append(
                Slot(
                    env,
                    f"{env}_{row}",
                    sample,
                    outcome=Outcome.ENV_ERROR if math.isnan(success) else Outcome.SCORED,
                    success=success == 1.0,
                    num_turns=3,
                    family=families[row] if families else None,
                )
            )
    return Result({}, tuple(slots))
