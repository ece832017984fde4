"""The first part of a run: data, demonstrations, initial model, warm start."""

from __future__ import annotations

import sys

from prefect import flow

from flows.common import RunRequest, fleets_down, is_preparation, run_name, run_steps
from flows.shell import main


@flow(name="prepare", flow_run_name=run_name, persist_result=False, on_cancellation=[fleets_down])
def prepare(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """Pull and split the data, play demonstrations, make the initial model and warm it up.
    Steps that are done are skipped. Result: the outcome of each step.
    """
    return run_steps(run, is_preparation)


if __name__ == "__main__":
    sys.exit(main("flows.prepare", prepare, is_preparation))
