"""What an audit found of a run, as `agentgym audit --keep` leaves it for the gate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from agentgym.evaluation.gate import AuditState
from agentgym.store.runstore import RunStore

STEP, RECORD = "audits", "audit.json"


class Audited(TypedDict):
    """Fields of the gate's evidence."""

    audit: AuditState
    audit_note: str


def keep_audit(store: RunStore, report: Mapping[str, Any]) -> None:
    """report: as `AuditReport.to_json` gives it. The last one counts. Errors: LeaseHeld."""
    key = str(report["run_key"])
    with store.open(STEP, key) as writer:
        writer.commit(
            done=False,
            state={"ok": report["ok"], "seed": report["seed"]},
            parents={},
            config={"run_key": key},
            blobs={},
            records={RECORD: json.dumps(report, separators=(",", ":")).encode()},
            results={},
            timings={},
        )


def kept_audit(store: RunStore, run_key: str) -> Audited:
    """Of the run with this key; `none` where no audit was kept."""
    head = store.head(STEP, run_key) if run_key else None
    if head is None:
        return {"audit": "none", "audit_note": ""}
    report = json.loads(store.read(head, RECORD))
    failed = [check for check in report["checks"] if not check["ok"]]
    note = "; ".join(
        f"{check['name']}: {next(iter(check['failures']), 'failed')}"[:300] for check in failed
    )
    return {"audit": "failed" if failed else "passed", "audit_note": note}
