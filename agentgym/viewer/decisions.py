"""Decisions on the aliases of registered models, from the index: which version, judged by what."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace

from agentgym.evaluation.history import Entry, Version
from agentgym.evaluation.record import STEP
from agentgym.store.runstore import folder_name
from agentgym.viewer.index import config_of

MOST = 200  # decisions on the page


def decision_text(data: bytes) -> str:
    """Return a decision's record as the index keeps it: of its evidence, only the environments
    (`envs`) and the digests of the candidate's and the champion's evaluation (`questions`).
    Errors: ValueError, LookupError, TypeError or AttributeError if it is no decision.
    """
    entry = Entry.from_bytes(data)
    for version in (entry.candidate, *filter(None, (entry.before, entry.after))):
        texts = [*version.evaluation.values(), version.number, version.checkpoint, version.run_key]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"version {version.number} is none")
    evidence, rules = entry.decision.get("evidence") or {}, entry.decision.get("rules") or ()
    candidate, champion = map(str, evidence.get("questions", ("", "")))
    kept = {
        "verdict": entry.verdict,
        "rules": [{name: str(rule[name]) for name in ("rule", "verdict", "why")} for rule in rules],
        "envs": sorted(evidence.get("pairs", ())),
        "questions": [candidate, champion],
    }
    return replace(entry, at=float(entry.at), decision=kept).to_bytes().decode()


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, and the folders of the evaluations that it compares."""

    entry: Entry
    model: str
    alias: str
    candidate: str  # folder of its evaluation; empty: unknown, or not in this store
    before: str  # of the champion's


def decided(reader: sqlite3.Connection) -> list[Decided]:
    """Return up to MOST decisions of an index, newest first."""
    folders = {folder for (folder,) in reader.execute("SELECT folder FROM steps WHERE head >= 0")}

    def judged_by(version: Version | None, question: str) -> str:
        evaluation = version.evaluation if version is not None else {}
        named = [folder_name(STEP, question)] if question else []
        if {"step", "key"} <= evaluation.keys():
            named.append(folder_name(evaluation["step"], evaluation["key"]))
        return next((folder for folder in named if folder in folders), "")

    rows = reader.execute(
        "SELECT decision, config FROM commits JOIN steps ON id = step_id"
        " WHERE decision IS NOT NULL ORDER BY commits.created DESC LIMIT ?",
        (MOST,),
    )
    newest_first = []
    for text, config in rows.fetchall():
        entry, about = Entry.from_bytes(text), config_of(config)
        candidate, before = entry.decision["questions"]
        folder_pair = judged_by(entry.candidate, candidate), judged_by(entry.before, before)
        model, alias = about.get("model", ""), about.get("alias", "")
        newest_first.append(Decided(entry, model, alias, *folder_pair))
    return newest_first


def judged(reader: sqlite3.Connection) -> set[str]:
    """Return the digests of the evaluations that decisions name as their evidence."""
    rows = reader.execute("SELECT decision FROM commits WHERE decision IS NOT NULL")
    return {digest for (text,) in rows for digest in json.loads(text)["decision"]["questions"]}
