"""The stages of the curriculum, one after another."""

from __future__ import annotations

import sys

from prefect import flow

from flows.common import RunRequest, fleets_down, is_training, run_name, run_steps
from flows.shell import main


@flow(name="train", flow_run_name=run_name, persist_result=False, on_cancellation=[fleets_down])
def train(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """Train every stage of the horizon schedule that is not done, from its last commit; needs the
    results of `prepare`. Result: the outcome of each stage.
    """
    return run_steps(run, is_training)


if __name__ == "__main__":
    sys.exit(main("flows.train", train, is_training))
