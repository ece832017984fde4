"""Environment servers that outlive a run: runs start at once with them, and several share one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from prefect import flow

from agentgym.console.ending import guarded, say
from agentgym.deploy.kubernetes import check_fleets
from agentgym.private import private_state
from flows.common import RunRequest, add_run, run_name, run_of
from services.prefect_server import prefect_api
from tasks.steps import end_environments, keep_environment, servers_artifact


@flow(name="envs-up", flow_run_name=run_name, persist_result=False)
def envs_up(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """Start servers of each environment of this run and leave them running, on this machine or on
    Kubernetes (`env.deploy`), until the flow envs-down or for `env.keep_s`; runs with the same
    `env.options` use them. Running servers stay. An environment with `endpoints` gets none.
    Result: environment -> address or name of its fleet.
    Errors: ConfigError, also if a running server has other code or too few sessions for this run;
    RuntimeError if a server does not start; those of `keep_up` on Kubernetes.
    """
    cfg = run.config()
    private_state(cfg.state_dir)
    check_fleets(cfg)
    servers = [keep_environment(cfg, env) for env in cfg.envs if not env.endpoints]
    servers_artifact(servers, "Servers that stay until the flow envs-down, or for `env.keep_s`.")
    return {server.env: server.where for server in servers}


@flow(name="envs-down", flow_run_name=run_name, persist_result=False)
def envs_down(run: RunRequest = RunRequest()) -> dict[str, str]:  # noqa: B008 (it is frozen)
    """End every server that envs-up has started for this state folder, and its Kubernetes fleets
    of this run. Result: environment -> former address, and "fleet" -> name of the last fleet.
    """
    servers = end_environments(run.config())
    servers_artifact(servers, "Servers that were ended.")
    return {server.env: server.where for server in servers}


FLOWS: dict[str, Any] = {"up": envs_up, "down": envs_down}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit codes: see `agentgym.cli.main`."""
    parser = argparse.ArgumentParser(prog="python -m flows.environments")
    parser.add_argument("what", choices=FLOWS)
    add_run(parser)
    arguments = parser.parse_args(argv)

    def run() -> int:
        request = run_of(arguments)
        cfg = request.config()  # raises its errors before anything starts
        private_state(cfg.state_dir)
        with prefect_api(cfg.state_dir):
            servers = FLOWS[arguments.what](request)
        for env, where in servers.items():
            say(f"{arguments.what:<6}{env} at {where}")
        if not servers:
            say("no server was kept")
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
