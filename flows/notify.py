"""What runs when a run has failed: it tells people."""

from __future__ import annotations

from uuid import UUID

from prefect import flow

from tasks.notify import tell

BLOCK = "slack-webhook/agentgym-failures"


@flow(name="notify", persist_result=False)
def notify(flow_run_id: UUID, block: str = BLOCK) -> str:
    """Send which step of a run failed, why, and how to go on, through a notification block."""
    return tell(flow_run_id, block)
