"""The flow that notifies people when a run has failed."""

from __future__ import annotations

from uuid import UUID

from prefect import flow

from tasks.notification import tell

BLOCK = "slack-webhook/agentgym-failures"


@flow(name="notify", persist_result=False)
def notify(flow_run_id: UUID, block: str = BLOCK) -> str:
    """Send the failed step, the reason and the command to continue through a notification block.
    block: TYPE/NAME of a block in Prefect. Result: the text. Errors: see `tasks.notification.tell`.
    """
    return tell(flow_run_id, block)
