"""Episodes beside each other: the samples of an item, attempts of several policies, two results."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.evaluation.paired import Decision, align, compare
from agentgym.evaluation.result import Outcome, Result, Slot
from agentgym.viewer.bodies import Found, address_of
from agentgym.viewer.servers import config_of

MOST = 16  # episodes beside each other
CONFIDENCE = 0.95
# statuses whose episodes count, as SQL has them
COUNTS = "reward IS NOT NULL"


@dataclass(frozen=True, slots=True)
class Column:
    """An episode among others."""

    found: Found
    address: str
    parts: int | None  # turn, from 1, whose action is not the first column's; None: none is


@dataclass(frozen=True, slots=True)
class Beside:
    """Episodes beside each other."""

    columns: list[Column]
    common: int  # turns whose actions are equal in all
    same_outcome: bool  # of all that count, where there are several
    excluded: int  # that are not in the loss
    rest: int = 0  # episodes that are not shown


def beside(found: Sequence[Found], rest: int = 0) -> Beside:
    """In their order; the first one is what the others are compared with."""
    actions = [[turn.action for turn in each.episode.turns] for each in found]
    columns = [
        Column(each, each.address, parting(actions[0], own) if place else None)
        for place, (each, own) in enumerate(zip(found, actions, strict=True))
    ]
    common = min((len(own) for own in actions), default=0)
    for own in actions[1:]:
        common = min(common, (parting(actions[0], own) or common + 1) - 1)
    rewards = [each.row["reward"] for each in found if each.row["reward"] is not None]
    return Beside(
        columns,
        common,
        len(rewards) > 1 and len(set(rewards)) == 1,
        sum(bool(each.row["excluded"]) for each in found),
        rest,
    )


def parting(first: Sequence[str], other: Sequence[str]) -> int | None:
    """The first turn, from 1, at which two lists of actions are not equal; None where they are."""
    for turn, (a, b) in enumerate(zip(first, other, strict=False), 1):
        if a != b:
            return turn
    return None if len(first) == len(other) else min(len(first), len(other)) + 1


def group_of(reader: sqlite3.Connection, row: sqlite3.Row) -> list[sqlite3.Row]:
    """The samples that were played of an episode's item with it."""
    return reader.execute(
        "SELECT * FROM episodes WHERE (item, step_id, seq, split, temperature, file)"
        " = (?, ?, ?, ?, ?, ?) ORDER BY sample, line",
        [row[name] for name in ("item", "step_id", "seq", "split", "temperature", "file")],
    ).fetchall()


@dataclass(frozen=True, slots=True)
class Attempts:
    """All episodes of an item that one step played at a time."""

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
    reader: sqlite3.Connection, steps: Mapping[int, sqlite3.Row], item: str, most: int
) -> list[Attempts]:
    """Of an item, in every step that played it; the oldest first."""
    rows = reader.execute(
        "SELECT * FROM episodes WHERE item = ? ORDER BY step_id, seq, temperature, sample, id"
        " LIMIT ?",
        (item, most),
    )
    found: dict[tuple[object, ...], Attempts] = {}
    for row in rows:
        step = steps[row["step_id"]]
        key = tuple(row[name] for name in ("step_id", "at", "split", "temperature"))
        own = found.setdefault(key, Attempts(step, row["at"], row["split"], row["temperature"], []))
        own.episodes.append((address_of(row, step), row))
    return sorted(found.values(), key=lambda each: (each.step["created"], each.at))


@dataclass(frozen=True, slots=True)
class Flip:
    """An episode slot whose success differs between two results."""

    item: str
    sample: int
    family: str
    before: str  # address
    after: str
    won: bool  # failed before, succeeds now


@dataclass(frozen=True, slots=True)
class Versus:
    """Two results beside each other."""

    decisions: Mapping[str, Decision]  # by environment
    won: list[Flip]
    lost: list[Flip]
    both: int  # slots that count in both
    families: list[tuple[str, str, int, float, float]]  # env, family, slots, before, after
    why_not: str = ""  # why nothing is decided
    flips: list[Flip] = field(default_factory=list)


def results(steps: Mapping[int, sqlite3.Row]) -> list[sqlite3.Row]:
    """Steps that evaluated somebody, the newest first."""
    found = [
        step
        for step in steps.values()
        if step["head"] is not None
        and {"evaluation", "protocol"} & config_of(step["config"]).keys()
    ]
    return sorted(found, key=lambda step: -step["created"])


def versus(
    reader: sqlite3.Connection,
    before: sqlite3.Row,
    after: sqlite3.Row,
    identities: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Versus:
    """What a result shows against another one: the decision of `agentgym compare`, and the slots
    that count in both. identities: what each of them asked.
    """
    rows = reader.execute(
        f"SELECT a.env, a.item, a.sample, ifnull(nullif(a.family, ''), b.family) AS family,"
        f" a.success AS old, b.success AS new, a.seq AS a_seq, a.file AS a_file, a.line AS a_line,"
        f" b.seq AS b_seq, b.file AS b_file, b.line AS b_line FROM episodes a"
        f" JOIN episodes b ON b.item = a.item AND b.step_id = ? AND b.sample = a.sample"
        f" WHERE a.step_id = ? AND a.{COUNTS} AND b.{COUNTS} ORDER BY a.env, a.task_id, a.sample",
        (after["id"], before["id"]),
    ).fetchall()
    flips = [
        Flip(
            row["item"],
            row["sample"],
            row["family"],
            f"{before['folder']}.{row['a_seq']}.{'tad'[row['a_file']]}{row['a_line']}",
            f"{after['folder']}.{row['b_seq']}.{'tad'[row['b_file']]}{row['b_line']}",
            bool(row["new"]),
        )
        for row in rows
        if row["old"] != row["new"]
    ]
    results = [
        _result(reader, step, identity)
        for step, identity in zip((before, after), identities, strict=True)
    ]
    try:
        decisions, why_not = compare(align(*results), confidence=CONFIDENCE), ""
    except ValueError as error:
        decisions, why_not = {}, str(error)
    return Versus(
        decisions,
        [flip for flip in flips if flip.won],
        [flip for flip in flips if not flip.won],
        len(rows),
        _families(rows),
        why_not if rows else "they have no item and sample in common that counts in both",
    )


def _result(reader: sqlite3.Connection, step: sqlite3.Row, identity: Mapping[str, Any]) -> Result:
    """A step's slots, each by its last attempt."""
    slots: dict[tuple[str, int], Slot] = {}
    for row in reader.execute(
        "SELECT env, item, sample, family, reward, success FROM episodes WHERE step_id = ?"
        " ORDER BY env, task_id, sample, seq, file = 0, line",
        (step["id"],),
    ):
        outcome = Outcome.ENV_ERROR if row["reward"] is None else Outcome.SCORED
        slots[row["item"], row["sample"]] = Slot(
            row["env"],
            row["item"],
            row["sample"],
            outcome=outcome,
            success=bool(row["success"]),
            family=row["family"] or None,
        )
    return Result(identity, tuple(slots.values()))


def _families(rows: Sequence[sqlite3.Row]) -> list[tuple[str, str, int, float, float]]:
    found: dict[tuple[str, str], list[sqlite3.Row]] = {}
    for row in rows:
        found.setdefault((row["env"], row["family"]), []).append(row)
    return [
        (
            env,
            family,
            len(own),
            sum(row["old"] for row in own) / len(own),
            sum(row["new"] for row in own) / len(own),
        )
        for (env, family), own in sorted(found.items())
    ]
