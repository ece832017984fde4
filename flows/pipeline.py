"""The whole job: data, environments, warm start, staged training, evaluation, registry, report."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from prefect import flow
from rich.console import Console

from agentgym.config import load_config
from agentgym.progress import Bars
from agentgym.steps import local_environment, steps_of
from flows.shell import main
from tasks.data import pull_data
from tasks.steps import environments_down, environments_up, step_task


@flow(name="pipeline", flow_run_name="{params}", persist_result=False)
def pipeline(params: str = "params.yaml", overrides: tuple[str, ...] = ()) -> dict[str, str]:
    """Run every step that is not done, in order; a killed run goes on from its last commit.

    params: a parameter file; overrides: `key.path=value` over it. Result: what happened to each step.
    """
    cfg = load_config(params, overrides)
    with Bars(Console()) as bars:
        bars.start("dataset", 1)
        pull_data(cfg.data.path)
        bars.advance()
        bars.start("environment", 1)
        servers, endpoints = environments_up(cfg)
        bars.advance()

        def environment(expert: bool) -> AbstractContextManager[list[str]]:
            return local_environment(cfg, True) if expert else nullcontext(endpoints)

        try:
            return {name: str(step_task(step)(name, cfg, environment, bars)) for name, step in steps_of(cfg).items()}
        finally:
            environments_down(servers)


if __name__ == "__main__":
    sys.exit(main("flows.pipeline", pipeline))
