"""Pages that compare episodes: groups, items, results, decisions, training."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request

from agentgym.evaluation.paired import Decision, align, compare
from agentgym.evaluation.result import Outcome, Result, Slot, differences
from agentgym.pages import Pages
from agentgym.viewer.bodies import Gone, IndexedEpisode, address_of
from agentgym.viewer.decisions import decided
from agentgym.viewer.episode_page import address_in
from agentgym.viewer.index import Address, config_of
from agentgym.viewer.names import identity_of
from agentgym.viewer.query import BadQuery
from agentgym.viewer.training import KINDS, training_of
from agentgym.viewer.viewer import Viewer

MOST = 16  # episodes side by side
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Column:
    """One of several episodes shown side by side, compared with the first of them."""

    found: IndexedEpisode
    parts: int | None  # first turn, from 1, whose action differs from the first column's, or None


@dataclass(frozen=True, slots=True)
class EpisodeColumns:
    """Several episodes in columns."""

    columns: list[Column]
    common: int  # leading turns whose actions are equal in all columns
    same_outcome: bool  # two or more episodes count, and their rewards are equal
    excluded: int  # episodes that are not in the loss


def beside(entries: Sequence[IndexedEpisode]) -> EpisodeColumns:
    """Return one or more episodes as columns that are compared with the first one."""
    actions = [[turn.action for turn in entry.episode.turns] for entry in entries]
    columns = [
        Column(entry, parting(actions[0], turns) if index else None)
        for index, (entry, turns) in enumerate(zip(entries, actions, strict=True))
    ]
    common = min((len(turns) for turns in actions), default=0)
    for turns in actions[1:]:
        common = min(common, (parting(actions[0], turns) or common + 1) - 1)
    rewards = [entry.row["reward"] for entry in entries if entry.row["reward"] is not None]
    same_outcome = len(rewards) > 1 and len(set(rewards)) == 1
    excluded = sum(bool(entry.row["excluded"]) for entry in entries)
    return EpisodeColumns(columns, common, same_outcome, excluded)


def parting(first: Sequence[str], other: Sequence[str]) -> int | None:
    """Return the first turn, from 1, at which two lists of actions differ; None if equal."""
    for turn, (a, b) in enumerate(zip(first, other, strict=False), 1):
        if a != b:
            return turn
    return None if len(first) == len(other) else min(len(first), len(other)) + 1


def group_of(reader: sqlite3.Connection, row: sqlite3.Row) -> list[sqlite3.Row]:
    """Return all samples of a row's item in its commit, file, split and temperature, in order."""
    return reader.execute(
        "SELECT * FROM episodes WHERE (item, step_id, seq, split, temperature, file)"
        " = (?, ?, ?, ?, ?, ?) ORDER BY sample, line",
        [row[name] for name in ("item", "step_id", "seq", "split", "temperature", "file")],
    ).fetchall()


@dataclass(frozen=True, slots=True)
class Attempts:
    """All episodes of an item from one step, optimizer step, split and temperature."""

    step: sqlite3.Row
    at: int
    split: str
    temperature: float
    episodes: list[tuple[str, sqlite3.Row]]  # address, row

    @property
    def success(self) -> float | None:
        counted = [row["success"] for _, row in self.episodes if row["reward"] is not None]
        return sum(counted) / len(counted) if counted else None


def attempts_of(
    reader: sqlite3.Connection, steps: Mapping[int, sqlite3.Row], item: str, limit: int
) -> list[Attempts]:
    """Return the attempts at an item, oldest step first. limit: maximum number of episodes read."""
    rows = reader.execute(
        "SELECT * FROM episodes WHERE item = ? ORDER BY step_id, seq, temperature, sample, id"
        " LIMIT ?",
        (item, limit),
    )
    by_key: dict[tuple[object, ...], Attempts] = {}
    for row in rows:
        step = steps[row["step_id"]]
        key = tuple(row[name] for name in ("step_id", "at", "split", "temperature"))
        new = Attempts(step, row["at"], row["split"], row["temperature"], [])
        by_key.setdefault(key, new).episodes.append((address_of(row, step), row))
    return sorted(by_key.values(), key=lambda attempts: (attempts.step["created"], attempts.at))


@dataclass(frozen=True, slots=True)
class Flip:
    """One sample of an item whose success differs between two results."""

    item: str
    sample: int
    family: str
    before: str  # address
    after: str
    won: bool  # failed before, succeeds now


@dataclass(frozen=True, slots=True)
class Versus:
    """The paired comparison of two results."""

    decisions: Mapping[str, Decision]  # by environment
    won: list[Flip]
    lost: list[Flip]
    both: int  # number of slots that count in both results
    families: list[tuple[str, str, int, float, float]]  # env, family, slots, before, after
    why_not: str = ""  # why there is no decision; empty: there is one


def results(steps: Mapping[int, sqlite3.Row]) -> list[sqlite3.Row]:
    """Return the evaluation steps that have a commit, newest first, unfinished ones included."""
    evaluations = [
        step
        for step in steps.values()
        if step["head"] is not None
        and {"evaluation", "protocol"} & config_of(step["config"]).keys()
    ]
    return sorted(evaluations, key=lambda step: -step["created"])


def versus(
    reader: sqlite3.Connection,
    before: sqlite3.Row,
    after: sqlite3.Row,
    identities: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Versus:
    """Return the paired comparison of the results of two evaluation steps, rows of the index.
    identities: settings of both, from `identity_of`.
    If they differ, or no slot counts in both, `why_not` has the reason and no decision is made.
    """
    rows = reader.execute(
        "SELECT a.env, a.item, a.sample, ifnull(nullif(a.family, ''), b.family) AS family,"
        " a.success AS old, b.success AS new, a.seq AS a_seq, a.file AS a_file, a.line AS a_line,"
        " b.seq AS b_seq, b.file AS b_file, b.line AS b_line FROM episodes a"
        " JOIN episodes b ON b.item = a.item AND b.step_id = ? AND b.sample = a.sample"
        " WHERE a.step_id = ? AND a.reward IS NOT NULL AND b.reward IS NOT NULL"
        " ORDER BY a.env, a.task_id, a.sample",
        (after["id"], before["id"]),
    ).fetchall()
    flips = [
        Flip(
            row["item"],
            row["sample"],
            row["family"],
            str(Address(before["folder"], row["a_seq"], row["a_file"], row["a_line"])),
            str(Address(after["folder"], row["b_seq"], row["b_file"], row["b_line"])),
            bool(row["new"]),
        )
        for row in rows
        if row["old"] != row["new"]
    ]
    pairs = zip((before, after), identities, strict=True)
    results = [_result(reader, step, identity) for step, identity in pairs]
    try:
        decisions, why_not = compare(align(*results), confidence=CONFIDENCE), ""
    except ValueError as error:
        decisions, why_not = {}, str(error)
    won, lost = ([flip for flip in flips if flip.won is succeeds] for succeeds in (True, False))
    if not rows:
        why_not = "they have no item and sample in common that counts in both"
    return Versus(decisions, won, lost, len(rows), _families(rows), why_not)


def _result(reader: sqlite3.Connection, step: sqlite3.Row, identity: Mapping[str, Any]) -> Result:
    """Return a step's result from its rows. The last attempt at an item and sample counts.
    An episode without a reward counts as an environment error.
    """
    slots: dict[tuple[str, int], Slot] = {}
    for row in reader.execute(
        "SELECT env, item, sample, family, reward, success FROM episodes WHERE step_id = ?"
        " ORDER BY env, task_id, sample, seq, file = 0, line",
        (step["id"],),
    ):
        outcome = Outcome.ENV_ERROR if row["reward"] is None else Outcome.SCORED
        key, success, family = (row["item"], row["sample"]), bool(row["success"]), row["family"]
        slots[key] = Slot(row["env"], *key, None, outcome, success, family=family or None)
    return Result(identity, tuple(slots.values()))


def _families(rows: Sequence[sqlite3.Row]) -> list[tuple[str, str, int, float, float]]:
    by_family: dict[tuple[str, str], list[sqlite3.Row]] = {}
    for row in rows:
        by_family.setdefault((row["env"], row["family"]), []).append(row)
    table = []
    for (env, family), its in sorted(by_family.items()):
        before, after = (sum(row[name] for row in its) / len(its) for name in ("old", "new"))
        table.append((env, family, len(its), before, after))
    return table


MOST_ATTEMPTS = 3_000  # episodes of an item on its page
MOST_FLIPS = 200  # on a page, in each direction


def add_study(app: FastAPI, viewer: Viewer, pages: Pages) -> None:
    """Add the pages `/e/.../group`, `/beside`, `/item`, `/compare`, `/decisions`, `/training`."""

    def side_page(
        title: str, entries: Sequence[IndexedEpisode], rest: int, *, is_group: bool
    ) -> str:
        context = {"title": title, "told": beside(entries), "rest": rest, "is_group": is_group}
        return pages.render("beside.html", **context, names=viewer.names)

    @app.get("/e/{address}/group")
    def group(address: str) -> str:
        entry = viewer.bodies.find(address_in(address))
        rows = group_of(viewer.index.reader, entry.row)
        shown = list(viewer.bodies.read(rows[:MOST]))
        title = f"{entry.row['item']}: the {len(rows)} samples of {viewer.names.step(entry.step)}"
        title += f", step {entry.row['at']}" if entry.row["at"] >= 0 else ""
        rest = len(rows) - len(shown)
        return side_page(title, shown, rest, is_group=True)

    @app.get("/beside")
    def side_by_side(request: Request) -> str:
        chosen = request.query_params.getlist("e")
        if not 1 < len(chosen) <= MOST:
            raise BadQuery(f"choose 2 to {MOST} episodes to see side by side")
        entries = [viewer.bodies.find(address_in(address)) for address in chosen]
        items = sorted({entry.row["item"] for entry in entries})
        title = f"{', '.join(items)}: {len(entries)} attempts"
        return side_page(title, entries, 0, is_group=False)

    @app.get("/item/{item}")
    def item(item: str) -> str:
        attempts = attempts_of(viewer.index.reader, viewer.bodies.steps(), item, MOST_ATTEMPTS)
        if not attempts:
            raise Gone(f"no episode of {item[:80]} is on record")
        total = sum(len(attempt.episodes) for attempt in attempts)
        context = {"item": item, "attempts": attempts, "names": viewer.names, "most": MOST}
        sums = {"total": total, "cut": total >= MOST_ATTEMPTS}
        return pages.render("item.html", **context, **sums, stamp=viewer.index.stamp)

    @app.get("/compare")
    def compare(a: str = "", b: str = "") -> str:
        return pages.render("compare.html", **_compared(viewer, a, b))

    @app.get("/decisions")
    def decisions() -> str:
        context = {"decisions": decided(viewer.index.reader), "stamp": viewer.index.stamp}
        return pages.render("decisions.html", **context, names=viewer.names, section="decisions")

    @app.get("/training")
    def training(run: str = "") -> str:
        return pages.render("training.html", **_trained(viewer, run))


def _compared(viewer: Viewer, a: str, b: str) -> dict[str, Any]:
    """Return the template context of `/compare`; without two comparable results, the choice alone.
    a, b: folders of evaluation steps; for an empty one see `_pair`.
    Errors: BadQuery for an unknown folder.
    """
    steps = viewer.bodies.steps()
    known = results(steps)
    by_folder = {step["folder"]: step for step in known}
    if missing := [folder for folder in (a, b) if folder and folder not in by_folder]:
        raise BadQuery(f"{missing[0][:80]!r} is no result that is known here")
    comparison: Versus | None = None
    questions: list[str] = []
    by_question = comparable(known)
    if not (a and b):
        a, b = _pair(by_question, a, b)
    if a and b:
        before, after = by_folder[a], by_folder[b]
        identities = (identity_of(before), identity_of(after))
        comparison = versus(viewer.index.reader, before, after, identities)
        questions = differences(*identities)[:12]
    return {
        "versus": comparison,
        "questions": questions,
        "results": known,
        "groups": [(question_name(question), steps) for question, steps in by_question.items()],
        "names": viewer.names,
        "a": a,
        "b": b,
        "most": MOST_FLIPS,
        "stamp": viewer.index.stamp,
        "section": "compare",
    }


def comparable(known: Sequence[sqlite3.Row]) -> dict[str, list[sqlite3.Row]]:
    """Return results by their question, as JSON: what identifies them, but for the policy."""
    by_question: dict[str, list[sqlite3.Row]] = {}
    for step in known:
        question = json.dumps({**identity_of(step), "policy": None}, sort_keys=True)
        by_question.setdefault(question, []).append(step)
    return by_question


def _pair(by_question: Mapping[str, Sequence[sqlite3.Row]], a: str, b: str) -> tuple[str, str]:
    """Return (before, after), folders of finished results of one question: the chosen one, `a` or
    `b`, or else the newest, and the newest other one. Result: (a, b) if there are no such two.
    by_question: from `comparable`, newest first.
    """
    for steps in by_question.values():
        folders = [step["folder"] for step in steps if step["done"]]
        chosen = a or b or next(iter(folders), "")
        other = next((folder for folder in folders if folder != chosen), "")
        if chosen in folders and other:
            return (a, other) if a else (other, chosen)
    return a, b


def question_name(question: str) -> str:
    """Return environments, numbers of items and turns of a question from `comparable`."""
    settings = json.loads(question)
    items = settings.get("items", {})
    parts = []
    for env in (settings.get("protocol") or {}).get("envs") or []:
        if {"env", "max_turns"} <= env.keys() and (name := env["env"]["name"]) in items:
            parts.append(f"{name}, {items[name]['num']} items, {env['max_turns']} turns")
    return " + ".join(parts) or "of an earlier version"


def _trained(viewer: Viewer, run: str) -> dict[str, Any]:
    """Return the template context of a run's training; run "": the newest that has trained.
    Errors: BadQuery for a run without training episodes.
    """
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
    query = "SELECT step_id FROM run_steps WHERE run = ?"
    step_ids = [row["step_id"] for row in reader.execute(query, (run,))]
    row = reader.execute("SELECT done FROM runs WHERE name = ?", (run,)).fetchone()
    stopped = viewer.why_stopped(run) if row is not None and not row["done"] else ""
    return {
        "runs": list(members),
        "names": viewer.names,
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
