"""Notifications about failed runs."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from prefect import get_client
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun
from prefect.settings import get_current_settings

from agentgym.config import ConfigError
from tasks.retries import retried

BLOCKS = "Slack Webhook, Email, Custom Webhook, ..."


def failure(run: FlowRun, failed: list[TaskRun], page: str) -> tuple[str, str]:
    """Return (subject, text): failed steps, reasons, how to continue. page: URL of Prefect's UI."""
    lines = [f"run: {run.name}"]
    for task_run in failed:
        lines.append(f"failed: {task_run.name}: {task_run.state.message if task_run.state else ''}")
    if not failed:
        lines.append(f"failed: {run.state.message if run.state else 'without a reason'}")
    lines += [
        f"page: {page}/runs/flow-run/{run.id}",
        f"when fixed: prefect flow-run retry {run.id} (continues from the last commit)",
    ]
    return f"agentgym: {run.name} failed", "\n".join(lines)


@retried("notify", delays_s=(2, 10, 60), timeout_s=60)
def tell(flow_run_id: UUID, block: str) -> str:
    """Send a report on a failed flow run through a Prefect notification block; return its text.
    block: TYPE/NAME. Errors: ConfigError if the block does not exist or sends no notifications.
    """
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        is_failed = TaskRunFilterStateType(any_=[StateType.FAILED])
        failed = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=is_failed, name=None)),
        )
    subject, text = failure(run, failed, get_current_settings().ui_url or "")
    _block(block).notify(text, subject=subject)
    return text


def _block(name: str) -> Any:
    try:
        block = cast(Any, Block.load)(name)
    except ValueError as error:
        raise ConfigError(
            f"notifications go through the block {name!r}, which cannot be used ({error}); make it"
            f" in Prefect's UI under Blocks ({BLOCKS}), or name another in prefect.yaml"
        ) from None
    if not isinstance(block, NotificationBlock):
        raise ConfigError(
            f"block {name!r} is a {type(block).__name__}, expected one that notifies: {BLOCKS}"
        )
    return block
