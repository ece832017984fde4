"""Pages that compare episodes: groups, items, results, decisions, training."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request

from agentgym.evaluation.result import differences
from agentgym.pages import Pages
from agentgym.store.manifest import BlobMissing, DigestMismatch
from agentgym.viewer.beside import MOST, attempts_of, beside, group_of, results, versus
from agentgym.viewer.bodies import Gone, IndexedEpisode
from agentgym.viewer.episode_page import address_in
from agentgym.viewer.query import BadQuery
from agentgym.viewer.rows import DECISION
from agentgym.viewer.servers import config_of
from agentgym.viewer.training import KINDS, training_of
from agentgym.viewer.viewer import Viewer

MOST_ATTEMPTS = 3_000  # episodes of an item on its page
MOST_FLIPS = 200  # on a page, in each direction


def add_study(app: FastAPI, viewer: Viewer, pages: Pages) -> None:
    """Add the pages `/e/.../group`, `/beside`, `/item`, `/compare`, `/decisions`, `/training`."""

    @app.get("/e/{address}/group")
    def group(address: str) -> str:
        entry = viewer.bodies.find(address_in(address))
        rows = group_of(viewer.index.reader, entry.row)
        shown = list(viewer.bodies.read(rows[:MOST]))
        title = f"{entry.row['item']}: the {len(rows)} samples of {entry.step['name']}"
        title += f", step {entry.row['at']}" if entry.row["at"] >= 0 else ""
        return _beside(pages, title, shown, len(rows) - len(shown), is_group=True)

    @app.get("/beside")
    def side_by_side(request: Request) -> str:
        chosen = request.query_params.getlist("e")
        if not 1 < len(chosen) <= MOST:
            raise BadQuery(f"choose 2 to {MOST} episodes to see side by side")
        entries = [viewer.bodies.find(address_in(address)) for address in chosen]
        items = sorted({entry.row["item"] for entry in entries})
        return _beside(pages, f"{', '.join(items)}: {len(entries)} attempts", entries, 0)

    @app.get("/item/{item}")
    def item(item: str) -> str:
        attempts = attempts_of(viewer.index.reader, viewer.bodies.steps(), item, MOST_ATTEMPTS)
        if not attempts:
            raise Gone(f"no episode of {item[:80]} is on record")
        total = sum(len(attempt.episodes) for attempt in attempts)
        return pages.render(
            "item.html",
            item=item,
            attempts=attempts,
            total=total,
            cut=total >= MOST_ATTEMPTS,
            most=MOST,
            stamp=viewer.index.stamp,
        )

    @app.get("/compare")
    def compare(a: str = "", b: str = "") -> str:
        return pages.render("compare.html", **_compared(viewer, a, b))

    @app.get("/decisions")
    def decisions() -> str:
        context = {"decisions": decided(viewer), "stamp": viewer.index.stamp}
        return pages.render("decisions.html", **context, section="decisions")

    @app.get("/training")
    def training(run: str = "") -> str:
        return pages.render("training.html", **_trained(viewer, run))


def _beside(
    pages: Pages, title: str, entries: list[IndexedEpisode], rest: int, *, is_group: bool = False
) -> str:
    columns = beside(entries, rest)
    return pages.render("beside.html", title=title, told=columns, is_group=is_group)


def _compared(viewer: Viewer, a: str, b: str) -> dict[str, Any]:
    """Return the template context of a comparison of two results.

    a, b: folders of steps. Errors: BadQuery.
    """
    steps = viewer.bodies.steps()
    known = results(steps)
    by_folder = {step["folder"]: step for step in known}
    missing = [folder for folder in (a, b) if folder and folder not in by_folder]
    if missing:
        raise BadQuery(f"{missing[0][:80]!r} is no result that is known here")
    comparison: dict[str, Any] = {"versus": None, "questions": []}
    if a and b:
        before, after = by_folder[a], by_folder[b]
        identities = (viewer.bodies.identity(before), viewer.bodies.identity(after))
        comparison = {
            "versus": versus(viewer.index.reader, before, after, identities),
            "questions": differences(*identities)[:12],
        }
    return {
        **comparison,
        "results": [(step["folder"], result_name(step)) for step in known],
        "a": a,
        "b": b,
        "most": MOST_FLIPS,
        "stamp": viewer.index.stamp,
        "section": "compare",
    }


def result_name(step: sqlite3.Row) -> str:
    """Return a result's label: step, policy and the beginning of its key."""
    config = config_of(step["config"])
    policy = config.get("policy")
    policy_name = str(policy.get("model") or policy.get("kind")) if isinstance(policy, dict) else ""
    return " ".join(filter(None, (step["name"], policy_name, step["key"][:12])))


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision on a model's alias, from the store."""

    number: int
    at: float
    verdict: str
    why: str
    who: str
    candidate: str  # folder of its evaluation; empty: unknown
    before: str
    rulings: list[tuple[str, str, str]]  # rule, verdict, why


def decided(viewer: Viewer) -> list[DecisionRow]:
    """Return up to 200 decisions, newest first; the error stands for an unreadable one."""
    rows = viewer.index.reader.execute(
        "SELECT steps.*, commits.seq AS seq FROM commits JOIN steps ON steps.id = step_id"
        " WHERE instr(files, ?) ORDER BY commits.created DESC LIMIT 200",
        (f'"{DECISION}"',),
    ).fetchall()
    newest_first = []
    for row in rows:
        try:
            tree = json.loads(viewer.bodies.file(row, row["seq"], DECISION))
            newest_first.append(_decision(tree))
        except (ValueError, TypeError, KeyError, AttributeError, BlobMissing) as error:
            what = "damaged" if isinstance(error, DigestMismatch) else "not readable here"
            why = f"{row['folder']} commit {row['seq']}: {error}"
            newest_first.append(DecisionRow(0, row["created"], what, why, "", "", "", []))
    return newest_first


def _decision(tree: dict[str, Any]) -> DecisionRow:
    decision = tree.get("decision") or {}
    rulings = [
        (str(rule.get("rule", "")), str(rule.get("verdict", "")), str(rule.get("why", "")))
        for rule in decision.get("rules", ())
        if isinstance(rule, dict)
    ]
    return DecisionRow(
        int(tree.get("number", 0)),
        float(tree.get("at", 0.0)),
        str(decision.get("verdict") or tree.get("kind", "")),
        str(tree.get("why", "")),
        str(tree.get("who", "")),
        _evaluation(tree.get("candidate")),
        _evaluation(tree.get("before")),
        rulings,
    )


def _evaluation(version: Any) -> str:
    """Return the folder of the evaluation that a version was judged by; empty if unknown."""
    judged = (version or {}).get("evaluation") or {}
    return f"{judged['step']}-{str(judged['key'])[:16]}" if {"step", "key"} <= judged.keys() else ""


def _trained(viewer: Viewer, run: str) -> dict[str, Any]:
    """Return the template context of a run's training; empty run: the newest. Errors: BadQuery."""
    reader = viewer.index.reader
    members: dict[str, list[int]] = {}
    for row in reader.execute(
        "SELECT run, step_id FROM run_steps JOIN runs ON runs.name = run WHERE step_id IN"
        " (SELECT DISTINCT step_id FROM episodes WHERE at >= 1 AND split = 'train')"
        " ORDER BY runs.created DESC"
    ):
        members.setdefault(row["run"], []).append(row["step_id"])
    if run and run not in members:
        raise BadQuery(f"{run[:80]!r} is no run that has trained here")
    run = run or next(iter(members), "")
    step_ids = [
        row["step_id"]
        for row in reader.execute("SELECT step_id FROM run_steps WHERE run = ?", (run,))
    ]
    row = reader.execute("SELECT done FROM runs WHERE name = ?", (run,)).fetchone()
    stopped = viewer.why_stopped(run) if row is not None and not row["done"] else ""
    return {
        "runs": list(members),
        "run": run,
        "told": viewer.once(f"training {run}", lambda: training_of(reader, step_ids))
        if run
        else None,
        "kinds": KINDS,
        "under_way": stopped is None,
        "stopped": stopped or "",
        "stamp": viewer.index.stamp,
        "section": "training",
    }
