"""Cleanup of the Jobs of cancelled flow runs.

A run's own process ends the run, but nothing then deletes its Job. A run whose pod never started
has no process to end it, and Prefect's worker leaves it alone.
This module reads the existing Jobs and asks Prefect about their runs.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from agentgym.deploy.kube.client import Kind, Kube
from services.overdue import PAGE, ask

logger = logging.getLogger(__name__)

JOB = Kind("batch/v1", "Job")
RUN = "prefect.io/flow-run-id"  # label of a Job
STARTING_S = 15.0  # a pod that is about to start ends its run by itself
ENDING_S = 900.0  # more than a run needs to take its servers down
ENDED = "cancelled; its Job was deleted"


def end_cancelled(
    api: str, login: str, kube: Kube, *, starting_s: float = STARTING_S, ending_s: float = ENDING_S
) -> list[str]:
    """End runs that are cancelling for too long; delete the Jobs of these and cancelled runs.

    api: `http://host:port/api`; login: `user:password`. Result: the ids of the runs.
    Errors: OSError (urllib's among them), ValueError, KubeError.
    """
    jobs: dict[str, list[str]] = defaultdict(list)
    for job in kube.list(JOB, labels={RUN: None}).items:
        if not job["metadata"].get("deletionTimestamp"):
            jobs[job["metadata"]["labels"][RUN]].append(job["metadata"]["name"])
    ids, over = sorted(jobs), []
    for first in range(0, len(ids), PAGE):
        wanted = {
            "id": {"any_": ids[first : first + PAGE]},
            "state": {"type": {"any_": ["CANCELLING", "CANCELLED"]}},
        }
        request = {"flow_runs": wanted, "limit": PAGE}
        runs = ask(f"{api}/flow_runs/filter", login, request)
        over += [run for run in runs if _is_over(run, starting_s, ending_s)]
    for run in over:
        for name in jobs[run["id"]]:
            kube.delete(JOB, name)
        if run["state"]["type"] == "CANCELLING":
            state = {"type": "CANCELLED", "message": ENDED}
            ask(f"{api}/flow_runs/{run['id']}/set_state", login, {"state": state})
        logger.info("flow run %s was cancelled; its Job is deleted", run["name"])
    return [run["id"] for run in over]


def _is_over(run: dict[str, Any], starting_s: float, ending_s: float) -> bool:
    """Return True if the run is cancelled, or has been cancelling for longer than it may."""
    if run["state"]["type"] == "CANCELLED":
        return True
    since = datetime.now(UTC) - datetime.fromisoformat(run["state"]["timestamp"])
    return since.total_seconds() > (ending_s if run.get("start_time") else starting_s)
