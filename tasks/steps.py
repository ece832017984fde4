"""One Prefect task run per step of a run, and tasks that start and end environment servers."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

from prefect import Task, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from agentgym.config import EnvConfig, RunConfig
from agentgym.deploy.environment import KeptServer, end_all, environment_servers, keep
from agentgym.deploy.kubernetes import end_kept, keep_up, of_fleets
from agentgym.pipeline.child import run_command
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, run_key, run_label, steps_of
from agentgym.steps.context import Environment, NoProgress, Progress
from agentgym.steps.step import Outcome, Step
from agentgym.types import Endpoints
from tasks.artifacts import progress_artifact, result_artifact
from tasks.retries import retried

LOCAL_TIMEOUT_S = 600.0
MORE_S = 300.0  # in addition to the cluster's timeout, for the other calls
STEP_TIMEOUT_S = 24 * 3600.0


def step_task(step: Step) -> Task[Any, str]:
    """Return the Prefect task that runs a step, under the step's title."""
    return _run.with_options(name=step.title, task_run_name=step.title)


@retried(timeout_s=STEP_TIMEOUT_S)
def _run(
    name: str, cfg: RunConfig, environment: Environment | None, progress: Progress | None
) -> str:
    with progress_artifact(name, progress or NoProgress()) as shown:
        outcome = run_step(name, cfg, environment=environment, progress=shown)
    result_artifact(cfg, outcome)
    return _summary(outcome)


def child_task(step: Step) -> Task[Any, str]:
    """Return the Prefect task that runs a step in a process of its own, under the step's title."""
    return _run_beside.with_options(name=step.title, task_run_name=step.title)


@retried()
def _run_beside(name: str, cfg: RunConfig, stop: threading.Event) -> str:
    """Run the step in a process with its own servers, isolated from concurrent steps. Result: a
    line about its outcome. stop: once set, the process is stopped and its commits remain.
    """
    run = run_key(cfg)[:12]
    run_command(("step", name), cfg, title=name, place=f"steps/r{run}-{name}", stop=stop)
    outcome = Outcome(steps_of(cfg)[name], finished(cfg, open_store(cfg))[name], "ran")
    result_artifact(cfg, outcome)
    return _summary(outcome)


def _summary(outcome: Outcome) -> str:
    """Return a line about the outcome. It is a new string per call, because Prefect draws an edge
    between tasks that share an object.
    """
    return f"{outcome} · manifest {outcome.manifest.digest[:12]}"


def environments_up(cfg: RunConfig) -> tuple[AbstractContextManager[Endpoints], Endpoints]:
    """Start the run's environment servers, without experts. Return (context manager that ends them,
    endpoints) once those that were started are ready.
    """
    timeout_s = LOCAL_TIMEOUT_S
    if of_fleets(cfg):
        timeout_s += cfg.kubernetes.ready_timeout_s + cfg.kubernetes.down_timeout_s
    return _up.with_options(timeout_seconds=timeout_s)(cfg)


@retried("environments up", run_name="environments up")
def _up(cfg: RunConfig) -> tuple[AbstractContextManager[Endpoints], Endpoints]:
    servers = environment_servers(cfg, False, run_label(cfg))
    return servers, servers.__enter__()


@task(
    name="environments down",
    task_run_name="environments down",
    timeout_seconds=LOCAL_TIMEOUT_S,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def environments_down(servers: AbstractContextManager[Endpoints]) -> None:
    """End the servers of `environments_up`."""
    servers.__exit__(None, None, None)


@dataclass(frozen=True)
class Standing:
    """Servers of an environment that stay up for later runs (`keep`), or that were just ended.
    For a Kubernetes fleet that was ended, `env` is "fleet" and `options` is empty.
    """

    env: str
    where: str  # an address, or a fleet
    held_by: str  # a process, or a namespace
    options: dict[str, Any]


def keep_environment(cfg: RunConfig, env: EnvConfig) -> Standing:
    """Return an environment's servers that stay up after the run; start them if none run.
    `end_environments` ends them.
    """
    return _keep.with_options(timeout_seconds=900 + cfg.kubernetes.ready_timeout_s)(cfg, env)


@retried("environment up", run_name="{env.name} up")
def _keep(cfg: RunConfig, env: EnvConfig) -> Standing:
    if env.deploy == "kubernetes":
        namespace = f"namespace {cfg.kubernetes.namespace}"
        return Standing(env.name, keep_up(cfg, env), namespace, env.options)
    return _of_kept(keep(cfg, env))


def end_environments(cfg: RunConfig) -> list[Standing]:
    """End the servers that `keep_environment` started: all of this state folder, and the Kubernetes
    fleets of this run. Return them.
    """
    return _end.with_options(timeout_seconds=MORE_S + cfg.kubernetes.down_timeout_s)(cfg)


@retried("environments down", run_name="environments down")
def _end(cfg: RunConfig) -> list[Standing]:
    ended = [_of_kept(server) for server in end_all(cfg.state_dir)]
    namespace = f"namespace {cfg.kubernetes.namespace}"
    return ended + [Standing("fleet", name, namespace, {}) for name in end_kept(cfg)]


def _of_kept(server: KeptServer) -> Standing:
    return Standing(server.env, server.url, f"process {server.pid}", server.options)


def servers_artifact(servers: list[Standing], description: str) -> None:
    """Create a table of the servers, without their tokens, on the flow run's page in Prefect."""
    titles = ("environment", "server", "held by", "options")
    rows = [dict(zip(titles, astuple(server), strict=True)) for server in servers]
    create_table_artifact(table=rows, key="environments", description=description)
