"""Which failures another try may mend."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from agentgym.config import ConfigError
from agentgym.pipeline.child import Stopped
from agentgym.store.lease import LeaseHeld
from agentgym.tracking.alarms import AlarmStop

FINAL = (ConfigError, LeaseHeld, Stopped, AlarmStop)


async def may_help(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """A wrong configuration, a step somebody else runs and what was stopped or stopped itself stay
    so; anything else goes on from the last commit.
    """
    result = await state.aresult(raise_on_failure=False)
    return not isinstance(result, FINAL)
