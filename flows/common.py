"""The common part of all flows: check the request, run its steps in order, end what was started."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

from prefect import Task, runtime
from prefect.futures import PrefectFuture
from prefect.logging.handlers import APILogHandler
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel, ConfigDict, Field

from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.console.progress import Bars, PlainConsole
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.kuberay import end_jobs
from agentgym.deploy.kubernetes import end_run, of_fleets
from agentgym.pipeline.stored_config import config_of_run
from agentgym.pipeline.table import finished, open_store, run_label, steps_of
from agentgym.rollouts.policies.hosts import one_engine
from agentgym.steps.context import Environment
from agentgym.steps.step import Kind, Step
from agentgym.store.manifest import Manifest
from agentgym.types import Endpoints
from envs.plain import PlainFormatter
from services.recovery import begin_attempt
from tasks.dataset import pull_data
from tasks.steps import child_task, environments_down, environments_up, step_task

Wanted = Callable[[Step], bool]  # True for a step that the flow runs
Override = Annotated[str, Field(pattern=r"^[\w.-]+=", examples=["optimizer.lr=3e-4"])]


class RunRequest(BaseModel):
    """A run: its parameter file, and the overrides."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    params: str = Field(
        default="params.yaml",
        min_length=1,
        title="Parameter file",
        description="A path from the project's root, for example params.yaml",
    )
    overrides: tuple[Override, ...] = Field(
        default=(),
        title="Overrides",
        description="key.path=value over the parameter file, for example optimizer.lr=3e-4",
    )

    def config(self, name: str = "") -> RunConfig:
        """Return the configuration of the run.

        name: a run of the store, whose settings are used; empty: the configured one.
        Errors: ConfigError with one line.
        """
        cfg = load_config(self.params, self.overrides)
        return config_of_run(name, cfg, self.params, self.overrides) if name else cfg


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a run, --params and overrides, which `run_of` reads."""
    add = parser.add_argument
    add("--params", default="params.yaml", help="parameter file (default: params.yaml)")
    add("overrides", nargs="*", metavar="key.path=value", help="over the parameter file")


def run_of(arguments: argparse.Namespace) -> RunRequest:
    """Return the run that the arguments of `add_run` describe."""
    return RunRequest(params=arguments.params, overrides=tuple(arguments.overrides))


def run_name() -> str:
    """Return a name for lists of runs: parameter file and overrides, cut to 120 characters."""
    request = RunRequest.model_validate(runtime.flow_run.parameters.get("run") or {})
    return " ".join([request.params, *request.overrides])[:120]


def fleets_down(flow: Any, flow_run: Any, state: Any) -> None:
    """Take down the fleets and jobs on Kubernetes of a cancelled flow run, in case its process was
    killed before it could. Prefect calls this.
    """
    cfg = RunRequest.model_validate(flow_run.parameters.get("run") or {}).config()
    try:
        if cfg.compute == "kuberay":  # GPUs first
            end_jobs(cfg, run_label(cfg))
    finally:
        if of_fleets(cfg):
            end_run(cfg, run_label(cfg))


def is_preparation(step: Step) -> bool:
    """Return True for data, demonstrations, initial model and warm start."""
    before = (Kind.PREPARE, Kind.DEMONSTRATE, Kind.INITIALIZE, Kind.TRAIN)
    return step.kind in before and not is_training(step)


def is_training(step: Step) -> bool:
    """Return True for the stages of the curriculum."""
    return step.stage is not None


def is_evaluation(step: Step) -> bool:
    """Return True for evaluations and what follows them: registered model, report, added steps."""
    return not is_preparation(step) and not is_training(step)


def is_any(step: Step) -> bool:
    """Return True: the flow runs all steps."""
    return True


def plain_logs() -> None:
    """Escape control characters in the logs that Prefect stores: Postgres refuses some."""
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            is_plain = isinstance(handler.formatter, PlainFormatter)
            if isinstance(handler, APILogHandler) and not is_plain:
                handler.setFormatter(PlainFormatter(handler.formatter))


def run_steps(run: RunRequest, wanted: Wanted) -> dict[str, str]:
    """Pull the data, start the environments, run every wanted step that is not done, in order, and
    end the environments.

    Result: step -> outcome as text. A killed run resumes from its last commit. Errors: ConfigError;
    that of the step that failed.
    """
    cfg = run.config()
    plain_logs()
    begin_attempt()
    with Bars(PlainConsole()) as bars:
        bars.start("dataset", 1)
        for folder in cfg.data_folders.values():
            pull_data(folder)
        bars.advance()
        check_parents(cfg, wanted, finished(cfg, open_store(cfg)))
        bars.start("environment", 1)
        servers, endpoints = environments_up(cfg)
        bars.advance()

        def environment(expert: bool) -> AbstractContextManager[Endpoints]:
            return (
                environment_servers(cfg, True, run_label(cfg)) if expert else nullcontext(endpoints)
            )

        try:
            steps = [step for step in steps_of(cfg).values() if wanted(step)]
            with one_engine(cfg):
                return _run_in_order(steps, cfg, environment, bars)
        finally:
            try:
                environments_down(servers)
            finally:  # also if no task can start any more, as in a cancelled flow run
                servers.__exit__(None, None, None)


def _run_in_order(
    steps: Sequence[Step], cfg: RunConfig, environment: Environment, bars: Bars
) -> dict[str, str]:
    """Run the steps, each after its parents. With `pipeline.parallel` above 1 an evaluation runs in
    parallel with later steps; if it fails, the run ends at the next step. Result: step -> outcome.
    """
    runs: dict[str, Any] = {}  # states of steps that ran here, futures of parallel ones
    stop, num_parallel = threading.Event(), cfg.pipeline.parallel - 1
    with ThreadPoolTaskRunner[str](max_workers=max(1, num_parallel)) as others:
        try:
            for step in steps:
                parents = [runs[name] for name in step.parents if name in runs]
                if num_parallel and step.kind is Kind.EVALUATE:
                    task: Task[Any, str] = child_task(step)
                    arguments = {"name": step.name, "cfg": cfg, "stop": stop}
                    runs[step.name] = others.submit(task, arguments, wait_for=parents)
                    continue
                futures = [run for run in runs.values() if isinstance(run, PrefectFuture)]
                for other in futures:  # report a failure as soon as it is known
                    if other in parents or other.state.is_final():
                        other.result()
                state: Any = step_task(step)(
                    step.name, cfg, environment, bars, wait_for=parents, return_state=True
                )
                state.result()
                runs[step.name] = state
            return {name: run.result() for name, run in runs.items()}
        finally:
            stop.set()  # ends evaluations that still run if this process is interrupted


def check_parents(cfg: RunConfig, wanted: Wanted, done: dict[str, Manifest]) -> None:
    """Raise ConfigError if a wanted step needs one that is neither done nor wanted."""
    table = steps_of(cfg)
    ready = done.keys() | {name for name, step in table.items() if wanted(step)}
    for step in filter(wanted, table.values()):
        if missing := [parent for parent in step.parents if parent not in ready]:
            flow = "flows.prepare" if is_preparation(table[missing[0]]) else "flows.train"
            needs = f"step {step.name} needs {', '.join(missing)} first"
            raise ConfigError(f"{needs}; run `python -m {flow}` with the same parameters")
