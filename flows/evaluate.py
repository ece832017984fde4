"""What came out: evaluations, registered model, report."""

from __future__ import annotations

import sys

from prefect import flow

from flows.run import RunRequest, fleets_down, is_evaluation, run_name, run_steps
from flows.shell import main


@flow(name="evaluate", flow_run_name=run_name, persist_result=False, on_cancellation=[fleets_down])
def evaluate(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """Evaluate every checkpoint, register the last one, write the report; needs what `train`
    makes.
    """
    return run_steps(run, is_evaluation)


if __name__ == "__main__":
    sys.exit(main("flows.evaluate", evaluate, is_evaluation))
