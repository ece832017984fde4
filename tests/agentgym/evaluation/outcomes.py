"""Results built from tables of outcomes."""

import math

from scipy.stats import binomtest

from agentgym.evaluation.intervals import Interval
from agentgym.evaluation.result import Outcome, Result, Slot

NAN = float("nan")


def wilson(successes, n):
    """Return Wilson's 95 % interval of a proportion, by scipy."""
    bounds = binomtest(successes, n).proportion_ci(0.95, "wilson")
    return Interval(successes / n, bounds.low, bounds.high, n)


def result_of(greedy, samples, families=None, envs=None):
    """Return a result, three turns per episode. greedy: [I], samples: [I, n], NaN for failures."""
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
