"""Trajectories that other agents recorded, in AgentGym's published layout: read, checked, and
written for a run to learn from.

A file is a JSON list of `{"item_id": ..., "conversations": [{"from": human | gpt, "loss": true |
false | null, "value": text}]}`.
The recorded observations are for people only: a run plays the actions again on its own environment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.config import RunConfig, first_of
from agentgym.data.items import (
    HALF_PAIR,
    DataError,
    Splits,
    data_digest,
    digest_of_files,
    has_lists,
    interleave,
    load_splits,
    parse_item_id,
    read_json,
)
from agentgym.types import Item

RECORDED = "trajectories.json"  # name of a run's copy of them
FILE = "{env}_trajectories.json"
MAX_FILE_BYTES = 1 << 30
MAX_REPLY_CHARS = 16_384  # an environment server's limit for an action
SENDERS = ("human", "gpt")  # who take turns in a conversation
Columns = dict[str, tuple[type, list[Any]]]  # name -> type and value of each row
Rules = dict[str, Callable[[Any], Any]]  # reason, with columns in braces -> rows that hold, of all


@dataclass(frozen=True, slots=True)
class Recorded:
    """Replies of another agent in one episode, from its first action on."""

    item: Item
    replies: tuple[str, ...]  # with the thought, if there is one
    file: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)  # in that file, from 0

    def refused(self, reason: str) -> Refusal:
        return Refusal(self.file, self.row, reason)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that a run cannot learn from."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.reason}"


def read_file(path: Path) -> tuple[list[dict[str, Any]], list[Recorded], list[Refusal]]:
    """Return (rows as they are, accepted trajectories, refused rows) of a file.
    Every row is in one of the last two; a repeated one is refused.
    Errors: DataError if the file itself cannot be used.
    """
    rows = _rows(path)
    reasons = _check_messages(rows) | _check_rows(rows)
    recorded: list[Recorded] = []
    first: dict[Recorded, int] = {}
    for index, row in enumerate(rows):
        if index in reasons:
            continue
        trajectory = Recorded(Item(*parse_item_id(row["item_id"])), _replies(row), path.name, index)
        if first.setdefault(trajectory, index) != index:
            reasons[index] = f"repeats row {first[trajectory]}"
        else:
            recorded.append(trajectory)
    return rows, recorded, [Refusal(path.name, index, reasons[index]) for index in sorted(reasons)]


def read_files(
    paths: Sequence[Path], cfg: RunConfig, *, drop_refused: bool
) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Return (rows to learn from, refused rows), checked against the item lists of the run.

    drop_refused: leave refused rows out; False: raise.
    Errors: DataError if a row is refused and not dropped, if none is left, or for a faulty file or
    item list.
    """
    accepted: list[dict[str, Any]] = []
    refusals: list[Refusal] = []
    splits: dict[str, Splits] = {}
    first: dict[Recorded, Recorded] = {}
    for path in paths:
        rows, recorded, refused = read_file(path)
        for env in sorted({trajectory.item.env for trajectory in recorded} - splits.keys()):
            # without lists, `outside` refuses its rows one by one
            if not cfg.data.path.is_dir() or has_lists(cfg.data.path, env):
                splits[env] = load_splits(
                    cfg.data.path,
                    env,
                    validation_fraction=cfg.data.validation_fraction,
                    seed=cfg.seed,
                )
        refused += outside(recorded, splits)
        pairs = [(trajectory, first.setdefault(trajectory, trajectory)) for trajectory in recorded]
        refused += [
            trajectory.refused(f"repeats {earlier.file} row {earlier.row}")
            for trajectory, earlier in pairs
            if earlier is not trajectory
        ]
        left_out = {refusal.row for refusal in refused}
        accepted += [row for index, row in enumerate(rows) if index not in left_out]
        refusals += sorted(refused, key=lambda refusal: refusal.row)
    if not drop_refused:
        _refuse(refusals, "correct them, or leave them out with --drop-refused")
    if not accepted:
        _refuse(refusals, "nothing is left to learn from")
    return accepted, refusals


def outside(recorded: Sequence[Recorded], splits: Mapping[str, Splits]) -> list[Refusal]:
    """Return refusals for trajectories of items outside the train lists: test items, unlisted ones,
    and those of environments without lists. splits: by environment.
    """
    refusals: list[Refusal] = []
    tests = {item.item_id for part in splits.values() for item in part.test}
    known = {item.item_id for part in splits.values() for item in (*part.train, *part.validation)}
    for trajectory in recorded:
        item, reason = trajectory.item, ""
        if item.env not in splits:
            reason = f"there are no item lists of {item.env}"
        elif item.item_id in tests:
            reason = f"{item.item_id} is a test item; learning from it, the test is not held out"
        elif item.item_id not in known:
            reason = f"{item.item_id} is not in the train list of {item.env}"
        if reason:
            refusals.append(trajectory.refused(reason))
    return refusals


def _refuse(refusals: Sequence[Refusal], advice: str) -> None:
    """Raise DataError with the first refusals and `advice` on what to do, if there are any."""
    if refusals:
        raise DataError(
            f"{first_of([str(refusal) for refusal in refusals], separator='; ')}; {advice}"
        )


def load_trajectories(folder: Path, splits: Mapping[str, Splits]) -> list[Recorded]:
    """Return the trajectories of train items in `folder`, for each environment of `splits`.
    Those of validation items are left out.

    Errors: DataError if a file is missing, a run cannot learn from a row, or none of an environment
    is left.
    """
    result: list[Recorded] = []
    for env, part in splits.items():
        path = _file_of(folder, env)
        _, recorded, refusals = read_file(path)
        foreign = [one.refused(f"is of {one.item.env}") for one in recorded if one.item.env != env]
        _refuse([*refusals, *foreign], "import them anew, see `agentgym data import-trajectories`")
        _refuse(
            outside(recorded, {env: part}),
            "import them anew with --drop-refused: the lists have changed since",
        )
        trained = {item.item_id for item in part.train}
        kept = [one for one in recorded if one.item.item_id in trained]
        if not kept:
            raise DataError(f"{path} holds no trajectory of a train item of {env}")
        result += kept
    return result


def input_digest(cfg: RunConfig) -> str:
    """sha256 over all data files a run reads, unparsed. Errors: DataError if one is missing."""
    lists = data_digest(cfg.data.path, *cfg.env_weights)
    if cfg.warm_start.source != "trajectories":
        return lists
    files = [_file_of(cfg.data.trajectories, env) for env in cfg.env_weights]
    return hashlib.sha256(f"{lists}{digest_of_files(files)}".encode()).hexdigest()


def _file_of(folder: Path, env: str) -> Path:
    path = folder / FILE.format(env=env)
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; bring it with `agentgym data import-trajectories` or `dvc pull"
            f" {folder}.dvc`, or set warm_start.source to expert"
        )
    return path


def encode(recorded: Sequence[Recorded]) -> bytes:
    """Encode items and replies as JSON; equal ones give equal bytes. `decode` inverts this."""
    rows = [{"item_id": one.item.item_id, "replies": list(one.replies)} for one in recorded]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode(data: bytes) -> list[Recorded]:
    """Invert `encode`. Errors: ValueError, KeyError, TypeError or AttributeError for other data."""
    return [
        Recorded(Item(*parse_item_id(row["item_id"])), tuple(row["replies"]))
        for row in json.loads(data)
    ]


def chosen(
    recorded: Sequence[Recorded],
    weights: Mapping[str, float],
    order: Sequence[int],
    num_trajectories: int,
) -> list[Recorded]:
    """Return the first `num_trajectories`, environments in turns by weight (see `interleave`).

    Trajectories of one item stay together.
    order: permutation of the items, which are numbered by first occurrence.
    """
    groups: dict[Item, list[Recorded]] = {}
    for trajectory in recorded:
        groups.setdefault(trajectory.item, []).append(trajectory)
    items = list(groups)
    return [
        trajectory
        for item in interleave([items[index] for index in order], weights)
        for trajectory in groups[item]
    ][:num_trajectories]


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Write (or replace) one file for each environment, in AgentGym's layout; create the folder.
    Result: environment -> number of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_env: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_env.setdefault(parse_item_id(row["item_id"])[0], []).append(row)
    for env, env_rows in by_env.items():
        some = [{key: row[key] for key in ("item_id", "conversations")} for row in env_rows]
        text = json.dumps(some, indent=1, ensure_ascii=False)
        (folder / FILE.format(env=env)).write_text(text + "\n", encoding="utf-8")
    return {env: len(env_rows) for env, env_rows in by_env.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    expected = f"{path} must hold a list of objects with item_id and conversations"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{expected}, got {'an empty list' if rows == [] else type(rows).__name__}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{expected}; row {index} is {json.dumps(row)[:80]}")
    return rows


def _conversation(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row's messages without a leading system text; empty if the row has no list of them.
    A message that is no object becomes {}.
    """
    conversation = row.get("conversations")
    some = conversation if isinstance(conversation, list) else []
    messages = [message if isinstance(message, dict) else {} for message in some]
    return messages[1:] if messages and messages[0].get("from") == "system" else messages


def _first(row: Mapping[str, Any]) -> int:
    """Return the index of the first observation: 2 after an initial exchange without loss, else 0.
    That exchange has the task's instructions and the agent's promise to follow them.
    """
    messages = _conversation(row)
    return 2 if len(messages) > 1 and messages[1].get("loss") is False else 0


def _replies(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(message.get("value") for message in _conversation(row)[_first(row) + 1 :: 2])


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return row index -> reason, for rows with an invalid id or conversation, or no reply."""
    ids, talks = ([row.get(name) for row in rows] for name in ("item_id", "conversations"))
    columns: Columns = {
        "item_id": (str, [json.dumps(item_id)[:80] for item_id in ids]),
        "task_id": (int, [_task_id(item_id) for item_id in ids]),
        "other": (str, ["" if isinstance(talk, list) else json.dumps(talk)[:40] for talk in talks]),
        "num_replies": (int, [len(_replies(row)) for row in rows]),
    }
    rules: Rules = {
        "item_id {item_id} is not `<env>_<index>`": lambda t: t["task_id"] >= 0,
        "conversations is {other}, not a list": lambda t: t["other"] == "",
        "holds no reply of the agent": lambda t: t["num_replies"] >= 1,
    }
    return _broken(columns, rules)


def _check_messages(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return row index -> the reason to refuse that row: its first invalid message."""
    messages = [
        (index, turn, message)
        for index, row in enumerate(rows)
        for turn, message in enumerate(_conversation(row))
    ]
    senders, values, losses = (
        [message.get(name) for _, _, message in messages] for name in ("from", "value", "loss")
    )
    acts = [bool(turn % 2) and turn > _first(rows[index]) for index, turn, _ in messages]
    columns: Columns = {
        "sender": (str, [who if who in SENDERS else json.dumps(who)[:40] for who in senders]),
        "expected": (str, [SENDERS[turn % 2] for _, turn, _ in messages]),
        "length": (int, [_length(value) for value in values]),
        "other": (str, ["" if _length(value) >= 0 else json.dumps(value)[:40] for value in values]),
        "is_action": (bool, acts),
        "loss": (str, [json.dumps(loss)[:40] for loss in losses]),
    }
    rules: Rules = {
        "is from {sender}; expected human or gpt": lambda t: t["sender"].isin(SENDERS),
        "is from {sender}; human and gpt must take turns, human first": (
            lambda t: t["sender"] == t["expected"]
        ),
        "has the value {other}, which is no text": lambda t: t["length"] >= 0,
        "has the loss {loss}; expected true, false or null": (
            lambda t: t["loss"].isin(["true", "false", "null"])
        ),
        f"has {{length}} characters; an environment reads {MAX_REPLY_CHARS}": (
            lambda t: ~t["is_action"] | (t["length"] <= MAX_REPLY_CHARS)
        ),
        "is an action with loss false; every action of a trajectory is learned from": (
            lambda t: ~t["is_action"] | (t["loss"] != "false")
        ),
    }
    reasons: dict[int, str] = {}
    for at, reason in _broken(columns, rules).items():
        index, turn, _ = messages[at]
        reasons.setdefault(index, f"message {turn} {reason}")
    return reasons


def _task_id(item_id: Any) -> int:
    """Return the index of an item id `<env>_<index>`; -1 for any other value."""
    env, task_id = parse_item_id(item_id) if isinstance(item_id, str) else ("", -1)
    return task_id if re.fullmatch("[a-z0-9-]+", env) else -1


def _length(value: Any) -> int:
    """Return the number of characters; -1 for no text and for a text with half a surrogate pair."""
    return len(value) if isinstance(value, str) and not HALF_PAIR.search(value) else -1


def _broken(columns: Columns, rules: Rules) -> dict[int, str]:
    """Return row index -> text of the first rule that the row breaks, filled in from its columns;
    failing rows only, in order.
    """
    # pandas and pandera take seconds to import
    import pandas as pd
    import pandera.pandas as pa

    table = pd.DataFrame(
        {name: pd.Series(values, dtype=kind) for name, (kind, values) in columns.items()}
    )
    schema = pa.DataFrameSchema(
        {name: pa.Column(kind) for name, (kind, _) in columns.items()},
        checks=[pa.Check(holds, error=text) for text, holds in rules.items()],
        strict=True,
    )
    texts, first = list(rules), dict[int, str]()
    try:
        schema.validate(table, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
        cases = cases[cases["check"].isin(texts)]
        failed = zip(cases["index"].astype(int), map(texts.index, cases["check"]), strict=True)
        for index, number in sorted(failed):
            first.setdefault(index, texts[number].format_map(table.loc[index]))
    return first
