"""Apply prefect.yaml and the recovery rules to a Prefect server, and report what that changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from agentgym.config import ConfigError
from services.overdue import PAGE, ask
from services.state import START_TIMEOUT_S, Services

FILE = Path("prefect.yaml")
# fields of a deployment that prefect.yaml decides, and that no run of it changes
DEPLOYMENT = (
    *("description", "tags", "entrypoint", "parameters", "work_pool_name", "job_variables"),
    *("pull_steps", "concurrency_options", "path", "version"),
)
AUTOMATION = ("description", "enabled", "trigger", "actions")

Known = dict[str, dict[str, Any]]  # "pipeline/local" or an automation's name -> its settings


def client_environment(services: Services) -> dict[str, str]:
    """Return environment variables for a process that is a client of this Prefect server."""
    return {
        "PWD": str(Path.cwd()),  # prefect.yaml's working directory
        "PREFECT_API_URL": services.api,
        "PREFECT_API_AUTH_STRING": services.login,
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # the longest wait of a submitted run
    }


def set_up(env: Mapping[str, str]) -> None:
    """Create or update pools, automations and deployments from this project's files, in child
    processes: Prefect's client would stay in memory. env: variables to add to theirs.

    Errors: ConfigError if prefect.yaml is not YAML; those of `run_module`.
    """
    try:
        yaml.safe_load(FILE.read_bytes())
    except yaml.YAMLError as error:
        raise ConfigError(f"{FILE} is not valid YAML: {' '.join(str(error).split())}") from None
    image = {"AGENTGYM_IMAGE": os.environ.get("AGENTGYM_IMAGE", "agentgym:latest")}
    run_module("services.supervisor", "pools", env={**image, **env})
    run_module("prefect", "--no-prompt", "deploy", "--all", env={**image, **env})


def run_module(*command: str, env: Mapping[str, str]) -> None:
    """Run `python -m COMMAND` with these variables added.
    Errors: RuntimeError with the end of its output if it fails; TimeoutExpired (START_TIMEOUT_S).
    """
    result = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        end = (result.stdout + result.stderr)[-2000:]
        failed = f"`python -m {' '.join(command)}` failed"
        raise RuntimeError(f"{failed} ({result.returncode}):\n{end}")


def apply(services: Services) -> list[str]:
    """Apply prefect.yaml to a running server. Result: a line for each change.
    Errors: as `set_up`; OSError (urllib's), ValueError if the server does not answer.
    """
    before = known(services)
    set_up(client_environment(services))
    return list(changes(before, known(services)))


def known(services: Services) -> tuple[Known, Known]:
    """Return (deployments, automations) of a server by name. Errors: OSError, ValueError."""

    def every(kind: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        address = f"{services.api}/{kind}/filter"
        while page := ask(address, services.login, {"limit": PAGE, "offset": len(rows)}):
            rows += page
        return rows

    flows = {flow["id"]: flow["name"] for flow in every("flows")}
    deployments = {
        f"{flows.get(deployment['flow_id'])}/{deployment['name']}": {
            **{name: deployment.get(name) for name in DEPLOYMENT},
            "concurrency_limit": (deployment.get("global_concurrency_limit") or {}).get("limit"),
            "schedules": {
                schedule.get("slug") or json.dumps(schedule["schedule"], sort_keys=True): {
                    name: schedule.get(name) for name in ("active", "schedule", "parameters")
                }
                for schedule in deployment.get("schedules", ())
            },
        }
        for deployment in every("deployments")
    }
    automations = {row["name"]: definition(row) for row in every("automations")}
    return deployments, automations


def changes(before: tuple[Known, Known], after: tuple[Known, Known]) -> Iterator[str]:
    """Yield a line per new or changed deployment, schedule or automation, and per lost schedule."""
    for name, now in after[0].items():
        then = before[0].get(name, {})
        yield from _differing(f"deployment {name}", _plain(then), _plain(now))
        switched, was = now["schedules"], then.get("schedules", {})
        for slug in sorted(switched.keys() | was.keys()):
            what = f"schedule {slug} of {name}"
            yield from _differing(what, was.get(slug), switched.get(slug), switch="active")
    for name, now in after[1].items():
        yield from _differing(f"automation {name!r}", before[1].get(name), now, switch="enabled")


def definition(automation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide what an automation does, without the server's ids."""
    return {name: _without_ids(automation.get(name)) for name in AUTOMATION}


def _differing(
    what: str, then: Mapping[str, Any] | None, now: Mapping[str, Any] | None, switch: str = ""
) -> Iterator[str]:
    """Yield a line about `what` if the two differ. None: absent. switch: field that turns it on."""
    if then == now:
        return
    state = f", {'on' if (now or {})[switch] else 'off'}" if switch and now else ""
    if not then:
        yield f"{what}: new{state}"
    elif now is None:
        yield f"{what}: gone"
    else:
        fields = sorted(name for name in now if then.get(name) != now[name])
        if fields == [switch]:
            yield f"{what}: switched {state.removeprefix(', ')}"
        else:
            yield f"{what}: changed ({', '.join(fields)}){state}"


def _plain(deployment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in deployment.items() if name != "schedules"}


def _without_ids(value: Any) -> Any:
    """Return a copy of a JSON value without the keys `id`, at any depth, and with lists of strings
    sorted.

    A recreated rule gets other ids, and the server gives such lists in any order.
    """
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key != "id"}
    if not isinstance(value, list):
        return value
    inner = [_without_ids(item) for item in value]
    return sorted(inner) if all(isinstance(item, str) for item in inner) else inner
