"""Second, slower recovery of crashed flow runs that the server's automations missed: an event is
delayed for 15 minutes if the one before it was lost (`PRECEDING_EVENT_LOOKBACK`). It works without
Prefect's client, which would stay in the supervisor's memory.
"""

from __future__ import annotations

import base64
import json
import logging
import urllib.request
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10  # of one flow run
OVERDUE_S = 30.0  # the automations answer within a second or two
TIMEOUT_S = 5.0  # of one request
PAGE = 200  # rows in one answer of the server

GOES_ON = "its process was lost; it continues from the last commit"


def given_up(attempts: int) -> str:
    """Return the message of a run that is marked as failed after so many attempts."""
    return (
        f"crashed {attempts} times; see its logs, then `prefect flow-run retry` continues from the"
        " last commit"
    )


def bring_back(
    api: str, login: str, *, max_attempts: int = MAX_ATTEMPTS, overdue_s: float = OVERDUE_S
) -> list[str]:
    """Reschedule each deployed flow run that has been crashed for overdue_s, of up to PAGE crashed
    ones. A run that has had max_attempts attempts is marked as failed.

    api: `http://host:port/api`. login: `user:password`. Result: the ids of these runs.
    Errors: OSError (urllib's among them), ValueError.
    """
    crashed = {"state": {"type": {"any_": ["CRASHED"]}}, "deployment_id": {"is_null_": False}}
    runs = ask(f"{api}/flow_runs/filter", login, {"flow_runs": crashed, "limit": PAGE})
    moved = []
    for run in runs:
        if (since := seconds_in_state(run)) < overdue_s:
            continue
        attempts = int(run["run_count"])
        if attempts < max_attempts:
            state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": GOES_ON}
        else:
            state = {"type": "FAILED", "message": given_up(attempts)}
        ask(f"{api}/flow_runs/{run['id']}/set_state", login, {"state": state})
        message = "flow run %s had been crashed for %.0f s and no automation answered: %s"
        logger.warning(message, run["name"], since, state["message"])
        moved.append(run["id"])
    return moved


def seconds_in_state(run: dict[str, Any]) -> float:
    """Return for how many seconds a flow run has been in its state. run: the server's JSON."""
    since = datetime.now(UTC) - datetime.fromisoformat(run["state"]["timestamp"])
    return since.total_seconds()


def ask(address: str, login: str, body: dict[str, Any]) -> Any:
    """POST JSON to Prefect's server and return the parsed reply. Errors: OSError, ValueError."""
    basic = f"Basic {base64.b64encode(login.encode()).decode()}"
    headers = {"Content-Type": "application/json", "Authorization": basic}
    # the address is our own server's
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)  # noqa: S310
    with opened(request, TIMEOUT_S) as reply:
        return json.load(reply)


def opened(request: urllib.request.Request | str, timeout_s: float) -> Any:
    """Send a request through no proxy and return the open reply. Errors: OSError (urllib's)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout_s)
