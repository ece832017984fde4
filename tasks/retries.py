"""Tasks of this project: never cached, and tried again after a failure that a retry may fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from agentgym.config import ConfigError
from agentgym.pipeline.child import Stopped
from agentgym.store.lease import LeaseHeld
from agentgym.tracking.points import AlarmStop

P = ParamSpec("P")
R = TypeVar("R")
FINAL = (ConfigError, LeaseHeld, Stopped, AlarmStop)


async def may_help(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return True if a retry, which continues from the last commit, may help.
    It cannot help after bad input, a stop or an alarm, nor while another process runs the step.
    """
    result = await state.aresult(raise_on_failure=False)
    return not isinstance(result, FINAL)


def retried(
    name: str | None = None,
    *,
    run_name: str | None = None,
    delays_s: Sequence[float] = (2,),
    timeout_s: float | None = None,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Return a decorator that makes a task, which is retried if `may_help` allows it.
    delays_s: pause before each retry, so also their number. timeout_s: limit of each attempt.
    """
    return task(
        name=name,
        task_run_name=run_name,
        retries=len(delays_s),
        retry_delay_seconds=list(delays_s),
        retry_condition_fn=may_help,
        timeout_seconds=timeout_s,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
