"""The rule for failures that a retry may fix."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from agentgym.config import ConfigError
from agentgym.pipeline.child import Stopped
from agentgym.store.lease import LeaseHeld
from agentgym.tracking.points import AlarmStop

FINAL = (ConfigError, LeaseHeld, Stopped, AlarmStop)


async def may_help(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return True if a retry may help, which continues from the last commit.
    It cannot help if the configuration is wrong, another process runs the step, or it was stopped.
    """
    result = await state.aresult(raise_on_failure=False)
    return not isinstance(result, FINAL)
