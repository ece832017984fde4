"""Telling people of a run that failed."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from prefect import get_client, task
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
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
from tasks.retries import may_help

BLOCKS = "Slack Webhook, Email, Custom Webhook, ..."


def failure(run: FlowRun, failed: list[TaskRun], page: str) -> tuple[str, str]:
    """(subject, text): which step, why, and how to go on."""
    lines = [f"run: {run.name}"]
    for each in failed:
        lines.append(f"failed: {each.name}: {each.state.message if each.state else ''}")
    if not failed:
        lines.append(f"failed: {run.state.message if run.state else 'it did not say why'}")
    lines += [
        f"page: {page}/runs/flow-run/{run.id}",
        f"when mended: prefect flow-run retry {run.id} (goes on from the last commit)",
    ]
    return f"agentgym: {run.name} failed", "\n".join(lines)


@task(
    name="notify",
    retries=3,
    retry_delay_seconds=[2, 10, 60],
    retry_condition_fn=may_help,
    timeout_seconds=60,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def tell(flow_run_id: UUID, block: str) -> str:
    """Send what is known of a failed run through a notification block. Result: what was sent.
    Errors: ConfigError where the block is none.
    """
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        failed = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
            task_run_filter=TaskRunFilter(
                state=TaskRunFilterState(
                    type=TaskRunFilterStateType(any_=[StateType.FAILED]), name=None
                )
            ),
        )
    subject, text = failure(run, failed, get_current_settings().ui_url or "")
    _block(block).notify(text, subject=subject)
    return text


def _block(name: str) -> Any:
    try:
        found = cast(Any, Block.load)(name)
    except ValueError as error:
        raise ConfigError(
            f"notifications go through the block {name!r}, which cannot be used ({error}); make it"
            f" in Prefect's UI under Blocks ({BLOCKS}), or name another in prefect.yaml"
        ) from None
    if not isinstance(found, NotificationBlock):
        raise ConfigError(
            f"block {name!r} is a {type(found).__name__}, expected one that notifies: {BLOCKS}"
        )
    return found
