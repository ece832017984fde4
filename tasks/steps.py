"""One Prefect task run per step of a run."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from prefect import Task, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from agentgym.config import ConfigError, RunConfig
from agentgym.context import Progress
from agentgym.steps import Environment, Outcome, Step, local_environment, run_step
from agentgym.store.lease import LeaseHeld

STEP_TIMEOUT_S = 24 * 3600.0


async def _may_help(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """A wrong configuration and a step somebody else runs stay so; anything else goes on from the last commit."""
    result = await state.aresult(raise_on_failure=False)
    return not isinstance(result, ConfigError | LeaseHeld)


def step_task(step: Step) -> Task[Any, Outcome]:
    """The task of one step, under the step's own title."""
    return _run.with_options(name=step.title, task_run_name=step.title)


@task(
    retries=1,
    retry_delay_seconds=2,
    timeout_seconds=STEP_TIMEOUT_S,
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_condition_fn=_may_help,
)
def _run(name: str, cfg: RunConfig, environment: Environment | None, progress: Progress | None) -> Outcome:
    outcome = run_step(name, cfg, environment=environment, progress=progress)
    results = json.dumps(outcome.manifest.results, indent=1)
    create_markdown_artifact(
        key=f"step-{name}",
        markdown=f"# {outcome.step.title}\n\n{outcome} · manifest `{outcome.manifest.digest[:12]}` · "
        f"{outcome.manifest.timings.get('wall_s', 0.0):.1f} s\n\n```json\n{results}\n```\n",
        description=str(outcome),
    )
    return outcome


@task(name="environments up", retries=1, retry_delay_seconds=2, timeout_seconds=600, cache_policy=NO_CACHE, persist_result=False)
def environments_up(cfg: RunConfig) -> tuple[AbstractContextManager[list[str]], list[str]]:
    """(what ends them, endpoints) once every server has played its scripted episode."""
    servers = local_environment(cfg, False)
    return servers, servers.__enter__()


@task(name="environments down", timeout_seconds=120, cache_policy=NO_CACHE, persist_result=False)
def environments_down(servers: AbstractContextManager[list[str]]) -> None:
    """End what `environments_up` started."""
    servers.__exit__(None, None, None)
