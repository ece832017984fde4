"""A decision about an alias as others read it: tags, a note, JSON, a sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from agentgym.config import GateConfig
from agentgym.evaluation.gate import Evidence, Judgement, judge
from agentgym.evaluation.history import Entry, History
from agentgym.store.manifest import sha256

FOLDER = "decisions"  # of a run's artifacts in MLflow, with a folder for each history
MADE_IN = "made_in"  # of a decision: the store that has its evidence
VERDICT, WHY, DECISION = "gate.verdict", "gate.why", "gate.decision"  # tags of a version


def artifact(history: History, entry: Entry) -> str:
    """Return the path of a decision among the artifacts of its MLflow run."""
    return f"{FOLDER}/{history.began[:12]}/{entry.number:04d}.json"


def decision_tags(entry: Entry) -> dict[str, str]:
    """Tags with verdict, reason and digest of the entry, for the version that it decided on."""
    verdict = entry.verdict or entry.kind.upper()
    return {VERDICT: verdict, WHY: entry.why[:5000], DECISION: sha256(entry.to_bytes())}


def note_of(entry: Entry, artifact_path: str) -> str:
    """Return the Markdown text about its last decision for a version's page in MLflow."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.at))
    over = f" over version {entry.before.number}" if entry.before else ""
    lines = [
        f"**{entry.verdict or entry.kind}**{over}: {entry.why}",
        "",
        f"Decision {entry.number}, {when}, by {entry.who}; `{artifact_path}` among its run's"
        " artifacts has the numbers and the items.",
    ]
    rules = entry.decision.get("rules", [])
    if rules:
        lines += ["", "| rule | verdict | why |", "|---|---|---|"]
        lines += [
            f"| {' '.join((rule['rule'], rule['env'])).strip()} | {rule['verdict']} |"
            f" {rule['why'].replace('|', ' ')} |"
            for rule in rules
        ]
    candidate = entry.candidate
    named = {
        "checkpoint": candidate.checkpoint[:12],
        "run": candidate.run_key and f"r{candidate.run_key[:12]}",
        "evaluation": candidate.evaluation.get("digest", "")[:12],
    }
    lineage = ", ".join(f"{name} `{value}`" for name, value in named.items() if value)
    lines += ["", f"Lineage: {lineage}; all it was made of: `agentgym lineage {candidate.number}`"]
    return "\n".join(lines)


def decision_json(rules: GateConfig, evidence: Evidence, judgement: Judgement) -> dict[str, Any]:
    """Return the judgement as JSON types, with the rules and the evidence that it follows from."""
    return {
        **judgement.to_json(),
        "item_set": evidence.item_set,
        "settings": json.loads(json.dumps(rules.model_dump(mode="json"))),
        "evidence": evidence.to_json(),
    }


def judged_again(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision, judged again from its record. Errors: ValueError, KeyError, TypeError."""
    rules = GateConfig.model_validate(decision["settings"])
    evidence = Evidence.from_json(decision["evidence"])
    location = {MADE_IN: decision[MADE_IN]} if MADE_IN in decision else {}
    return {**decision_json(rules, evidence, judge(rules, evidence)), **location}


def summary(entry: Entry) -> dict[str, Any]:
    """Return an entry's summary for steps and pages; equal for a command and its repetition."""
    return {
        "verdict": entry.verdict,
        "moved": entry.moved,
        "why": entry.why,
        "over": entry.before.number if entry.before else None,
        "needed_items": entry.decision.get("needed_items"),
        "rules": [
            {name: rule[name] for name in ("rule", "env", "verdict", "why")}
            for rule in entry.decision.get("rules", [])
        ],
    }


def sentence(registered: Mapping[str, Any]) -> str:
    """Return a line on what happened to the alias, without its name, from `register`'s results."""
    decision = registered["champion"]
    verdict = f"{decision['verdict']}: " if decision.get("verdict") in ("HOLD", "REJECT") else ""
    if decision["moved"]:
        return f"moves to version {registered['version']}: {decision['why']}"
    holder = f"stays with version {decision['over']}" if decision["over"] else "is given to nobody"
    return f"{holder}: {verdict}{decision['why']}"
