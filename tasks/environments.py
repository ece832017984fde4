"""Environment servers that outlive a run, as tasks."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from agentgym.config import EnvConfig, RunConfig
from agentgym.deploy.kept import Kept, end_all, keep
from tasks.retries import may_help


@task(
    name="environment up",
    task_run_name="{env.name} up",
    retries=1,
    retry_delay_seconds=2,
    retry_condition_fn=may_help,
    timeout_seconds=900,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def keep_environment(cfg: RunConfig, env: EnvConfig) -> Kept:
    """A server of this environment that runs until `end_environments`."""
    return keep(cfg, env)


@task(
    name="environments down",
    task_run_name="environments down",
    retries=1,
    retry_delay_seconds=2,
    timeout_seconds=300,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def end_environments(state: Path) -> list[Kept]:
    """End all that are kept there."""
    return end_all(state)


def servers_artifact(servers: list[Kept], description: str) -> None:
    """Which servers, on the flow run's page; never a token."""
    rows = [
        {"environment": each.env, "server": each.url, "process": each.pid, "options": each.options}
        for each in servers
    ]
    create_table_artifact(table=rows, key="environments", description=description)
