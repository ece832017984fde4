"""Audits for the promotion gate. With `gate.require_audit` an audit runs at the decision. Without
it, failures of a stored audit forbid promotion as long as the audited steps are in the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.gate import Audited
from agentgym.pipeline.child import run_command
from agentgym.pipeline.stored_config import label
from agentgym.pipeline.table import open_store
from agentgym.store.runstore import RunStore

STEP, RECORD = "audits", "audit.json"
NOTHING: Audited = {"audit": "none", "audit_note": ""}


def keep_audit(store: RunStore, report: Mapping[str, Any]) -> None:
    """Store the report of an audit; the gate reads the last one of a run.

    report: from `AuditReport.to_json`. Errors: LeaseHeld.
    """
    key = str(report["run_key"])
    with store.open(STEP, key) as writer:
        writer.commit(
            done=False,
            state={"ok": report["ok"], "seed": report["seed"]},
            config={"run_key": key},
            records={RECORD: json.dumps(report, separators=(",", ":")).encode()},
        )


def audit_for_gate(cfg: RunConfig, run_key: str) -> Audited:
    """Return the audit fields of the gate's evidence.

    If `gate.require_audit` is set, an audit runs now in a process of its own; else the failures of
    a stored audit count.
    """
    if not run_key:
        return NOTHING
    if not cfg.gate.require_audit:
        return _veto(open_store(cfg), run_key)
    name = label(run_key)
    try:
        run_command(("audit", name), cfg, title=f"audit of {name}", place=f"audits/{name}")
    except (ConfigError, RuntimeError) as error:
        return {"audit": "failed", "audit_note": str(error)[:1000]}
    return {"audit": "passed", "audit_note": ""}


def _veto(store: RunStore, run_key: str) -> Audited:
    head = store.head(STEP, run_key)
    if head is None:
        return NOTHING
    report = json.loads(store.read(head, RECORD))
    digests = {step.digest for step in store.heads()}
    if not set(report.get("finals", {}).values()) <= digests:
        return NOTHING  # a step was run again since
    failed = [check for check in report["checks"] if not check["ok"]]
    if report["ok"] and not failed:
        return NOTHING  # a pass proves nothing: a person who can write to the store can forge it
    note = "; ".join(
        f"{check['name']}: {next(iter(check['failures']), 'failed')}"[:300] for check in failed
    )
    return {"audit": "failed", "audit_note": note}
