"""Decisions on the aliases of registered models, from the index: which version, judged by what."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.evaluation.record import STEP
from agentgym.store.runstore import folder_name
from agentgym.viewer.index import config_of
from agentgym.viewer.names import Names

MOST = 200  # decisions on the page


@dataclass(frozen=True, slots=True)
class DecidedVersion:
    """A version of a registered model, as a decision names it."""

    number: str
    name: str  # of its checkpoint, or of its run; empty: unknown
    evaluation: str  # folder of the evaluation that judged it; empty: not in this store


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision on a model's alias, from the store."""

    number: int
    at: float
    verdict: str
    why: str
    who: str
    model: str
    alias: str
    envs: list[str]
    candidate: DecidedVersion | None
    before: DecidedVersion | None  # holder of the alias before the decision
    after: DecidedVersion | None
    rulings: list[tuple[str, str, str]]  # rule, verdict, why


def decided(reader: sqlite3.Connection, names: Names) -> list[DecisionRow]:
    """Return up to MOST decisions, newest first. An unreadable one is a row with the error."""
    keys = {row["folder"] for row in reader.execute("SELECT folder FROM steps WHERE head >= 0")}
    rows = reader.execute(
        "SELECT decision, config, folder, commits.created AS created FROM commits JOIN steps ON"
        " id = step_id WHERE decision IS NOT NULL ORDER BY commits.created DESC LIMIT ?",
        (MOST,),
    ).fetchall()
    newest_first = []
    for row in rows:
        tree, about = json.loads(row["decision"]), config_of(row["config"])
        try:
            newest_first.append(_decision(tree, about, names, keys))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            tree = {
                "at": row["created"],
                "why": f"{row['folder']}: {error}",
                "kind": "not readable here",
            }
            newest_first.append(_decision(tree, about, names, keys))
    return newest_first


def judged(reader: sqlite3.Connection) -> set[str]:
    """Return the keys of the evaluations that decisions name as their evidence."""
    rows = reader.execute("SELECT decision FROM commits WHERE decision IS NOT NULL")
    return {key for (text,) in rows for key in _questions(config_of(text).get("decision"))}


def _questions(decision: Any) -> list[str]:
    """Return the digests of the candidate's and the champion's evaluation; "" if unknown."""
    questions = decision.get("questions") if isinstance(decision, dict) else None
    return [*map(str, questions if isinstance(questions, list) else ()), "", ""][:2]


def _decision(
    tree: dict[str, Any], about: Mapping[str, Any], names: Names, folders: set[str]
) -> DecisionRow:
    decision = tree.get("decision") or {}
    candidate, champion = _questions(decision)

    def version(name: str, question: str) -> DecidedVersion | None:
        recorded = tree.get(name)
        if not recorded:
            return None
        own = recorded.get("evaluation") or {}
        known = [folder_name(STEP, question)] if question else []
        known += [folder_name(own["step"], own["key"])] if {"step", "key"} <= own.keys() else []
        run = str(recorded.get("run_key") or "")
        return DecidedVersion(
            str(recorded.get("number", "")),
            names.checkpoints.get(recorded.get("checkpoint"), run and f"of r{run[:12]}"),
            next((folder for folder in known if folder in folders), ""),
        )

    return DecisionRow(
        int(tree.get("number", 0)),
        float(tree.get("at", 0.0)),
        str(decision.get("verdict") or tree.get("kind", "")),
        str(tree.get("why", "")),
        str(tree.get("who", "")),
        str(about.get("model", "")),
        str(about.get("alias", "")),
        [str(env) for env in decision.get("envs", ())],
        version("candidate", candidate),
        version("before", champion),
        version("after", ""),
        [
            (str(rule.get("rule", "")), str(rule.get("verdict", "")), str(rule.get("why", "")))
            for rule in decision.get("rules", ())
            if isinstance(rule, dict)
        ],
    )
