"""The whole job: data, environments, warm start, staged training, evaluation, registry, report."""

from __future__ import annotations

import sys

from prefect import flow

from flows.common import RunRequest, fleets_down, is_any, run_name, run_steps
from flows.shell import main


@flow(name="pipeline", flow_run_name=run_name, persist_result=False, on_cancellation=[fleets_down])
def pipeline(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """Run every step that is not done, in order; a killed run continues from its last commit.
    Result: the outcome of each step.
    """
    return run_steps(run, is_any)


if __name__ == "__main__":
    sys.exit(main("flows.pipeline", pipeline, is_any))
