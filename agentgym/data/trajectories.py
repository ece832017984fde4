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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.config import RunConfig, first_of
from agentgym.data.items import (
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """Replies of another agent in one episode, from its first action on."""

    item: Item
    replies: tuple[str, ...]  # with the thought, if there is one
    file: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)  # in that file, from 0

    @property
    def where(self) -> str:
        return f"{self.file} row {self.row}"

    def to_json(self) -> dict[str, Any]:
        return {"item_id": self.item.item_id, "replies": list(self.replies)}


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
            Refusal(trajectory.file, trajectory.row, f"repeats {earlier.where}")
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
            refusals.append(Refusal(trajectory.file, trajectory.row, reason))
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
        foreign = [
            Refusal(trajectory.file, trajectory.row, f"is of {trajectory.item.env}")
            for trajectory in recorded
            if trajectory.item.env != env
        ]
        _refuse([*refusals, *foreign], "import them anew, see `agentgym data import-trajectories`")
        _refuse(
            outside(recorded, {env: part}),
            "import them anew with --drop-refused: the lists have changed since",
        )
        trained = {item.item_id for item in part.train}
        train_trajectories = [
            trajectory for trajectory in recorded if trajectory.item.item_id in trained
        ]
        if not train_trajectories:
            raise DataError(f"{path} holds no trajectory of a train item of {env}")
        result += train_trajectories
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
    return json.dumps(
        [trajectory.to_json() for trajectory in recorded], separators=(",", ":")
    ).encode()


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
        text = json.dumps(
            [
                {"item_id": row["item_id"], "conversations": row["conversations"]}
                for row in env_rows
            ],
            indent=1,
            ensure_ascii=False,
        )
        (folder / FILE.format(env=env)).write_text(text + "\n", encoding="utf-8")
    return dict(Counter(parse_item_id(row["item_id"])[0] for row in rows))


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
    messages = (
        [message if isinstance(message, dict) else {} for message in conversation]
        if isinstance(conversation, list)
        else []
    )
    return messages[1:] if messages and messages[0].get("from") == "system" else messages


def _first(row: Mapping[str, Any]) -> int:
    """Return the index of the first observation: 2 after an initial exchange without loss, else 0.
    That exchange has the task's instructions and the agent's promise to follow them.
    """
    messages = _conversation(row)
    return 2 if len(messages) > 1 and messages[1].get("loss") is False else 0


def _replies(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(message["value"] for message in _conversation(row)[_first(row) + 1 :: 2])


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return row index -> reason, for rows with an invalid id or conversation, or no reply."""
    # pandas and pandera take seconds to import
    import pandas as pd
    import pandera.pandas as pa

    table = pd.DataFrame(
        {
            "task_id": [_task_id(row.get("item_id")) for row in rows],
            "kind": [type(row.get("conversations")).__name__ for row in rows],
            "num_replies": [len(_conversation(row)[_first(row) + 1 :: 2]) for row in rows],
        }
    )
    schema = pa.DataFrameSchema(
        {
            "task_id": pa.Column(int, pa.Check.ge(0, error="item_id")),
            "kind": pa.Column(str, pa.Check.eq("list", error="conversations")),
            "num_replies": pa.Column(int, pa.Check.ge(1, error="replies")),
        },
        strict=True,
    )
    describe: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "item_id": lambda row: (
            f"item_id {json.dumps(row.get('item_id'))[:80]} is not `<env>_<index>`"
        ),
        "conversations": lambda row: (
            f"conversations is {json.dumps(row.get('conversations'))[:40]}, not a list"
        ),
        "replies": lambda row: "holds no reply of the agent",
    }
    failures = _failures(schema, table, list(describe))
    return {index: describe[check](rows[index]) for index, check in failures.items()}


def _check_messages(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return row index -> the reason to refuse that row: its first invalid message."""
    import pandas as pd
    import pandera.pandas as pa

    messages = [
        (index, turn, message)
        for index, row in enumerate(rows)
        for turn, message in enumerate(_conversation(row))
    ]
    table = pd.DataFrame(
        {
            "sender": [json.dumps(message.get("from")) for _, _, message in messages],
            "expected": ['"gpt"' if turn % 2 else '"human"' for _, turn, _ in messages],
            "length": [_length(message.get("value")) for _, _, message in messages],
            "is_action": [
                bool(turn % 2) and turn > _first(rows[index]) for index, turn, _ in messages
            ],
            "loss": [json.dumps(message.get("loss")) for _, _, message in messages],
        }
    ).astype({"sender": str, "expected": str, "length": int, "is_action": bool, "loss": str})
    schema = pa.DataFrameSchema(
        {
            "sender": pa.Column(str, pa.Check.isin(['"human"', '"gpt"'], error="sender")),
            "expected": pa.Column(str),
            "length": pa.Column(int, pa.Check.ge(0, error="text")),
            "is_action": pa.Column(bool),
            "loss": pa.Column(str, pa.Check.isin(["true", "false", "null"], error="flag")),
        },
        checks=[
            pa.Check(lambda t: t["sender"] == t["expected"], error="turns"),
            pa.Check(lambda t: ~t["is_action"] | (t["length"] <= MAX_REPLY_CHARS), error="long"),
            pa.Check(lambda t: ~t["is_action"] | (t["loss"] != "false"), error="loss"),
        ],
        strict=True,
    )
    describe: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "sender": lambda message: (
            f"is from {json.dumps(message.get('from'))[:40]}; expected human or gpt"
        ),
        "turns": lambda message: (
            f"is from {message.get('from')}; human and gpt must take turns, human first"
        ),
        "text": lambda message: (
            f"has the value {json.dumps(message.get('value'))[:40]}, which is no text"
        ),
        "flag": lambda message: (
            f"has the loss {json.dumps(message.get('loss'))[:40]}; expected true, false or null"
        ),
        "long": lambda message: (
            f"has {len(message['value'])} characters; an environment reads {MAX_REPLY_CHARS}"
        ),
        "loss": lambda message: (
            "is an action with loss false; every action of a trajectory is learned from"
        ),
    }
    reasons: dict[int, str] = {}
    for at, check in _failures(schema, table, list(describe)).items():
        index, turn, message = messages[at]
        reasons.setdefault(index, f"message {turn} {describe[check](message)}")
    return reasons


def _task_id(item_id: Any) -> int:
    """Return the index of an item id `<env>_<index>`; -1 for any other value."""
    env, task_id = parse_item_id(item_id) if isinstance(item_id, str) else ("", -1)
    return task_id if re.fullmatch("[a-z0-9-]+", env) else -1


def _length(value: Any) -> int:
    """Return the number of characters; -1 for no text and for a text with half a surrogate pair."""
    try:
        return len(value) if isinstance(value, str) and value.encode() is not None else -1
    except UnicodeEncodeError:
        return -1


def _failures(schema: Any, table: Any, names: list[str]) -> dict[int, str]:
    """Return row index -> the first of `names` whose check the row fails; failing rows only."""
    import pandera.pandas as pa

    first: dict[int, str] = {}
    try:
        schema.validate(table, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
        cases = cases[cases["check"].isin(names)]
        failed = zip(cases["index"].astype(int), map(names.index, cases["check"]), strict=True)
        for index, number in sorted(failed):
            first.setdefault(index, names[number])
    return first
