"""Trajectories of others, in AgentGym's published layout: read, checked, and written for a run to
learn from.

A file is a JSON list of `{"item_id": ..., "conversations": [{"from": human | gpt, "loss": true |
false | null, "value": text}]}`.
What the environment said in them is only read by people: a run plays the actions again on its own
environment.
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

from agentgym.config import RunConfig
from agentgym.data.items import (
    DataError,
    Splits,
    data_digest,
    has_lists,
    interleave,
    load_splits,
    parse_item_id,
    read_json,
)
from agentgym.types import Item

RECORDED = "trajectories.json"  # of a run: what its own copy of them is called
FILE = "{env}_trajectories.json"
MAX_FILE_BYTES = 1 << 30
MAX_REPLY_CHARS = 16_384  # as long as an environment server reads an action
_SHOWN = 5  # refused rows in an error


@dataclass(frozen=True, slots=True)
class Recorded:
    """What somebody's agent said in one episode, beginning with its first action."""

    item: Item
    replies: tuple[str, ...]  # with the thought, where there is one
    file: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)  # in that file, from 0

    @property
    def where(self) -> str:
        return f"{self.file} row {self.row}"

    def to_json(self) -> dict[str, Any]:
        return {"item_id": self.item.item_id, "replies": list(self.replies)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that nothing can be learned from."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.reason}"


def read_file(path: Path) -> tuple[list[dict[str, Any]], list[Recorded], list[Refusal]]:
    """(rows as they are, what they say, those refused).
    Each row is in one of the last two. Errors: DataError for the file itself.
    """
    rows = _rows(path)
    reasons = _check_messages(rows) | _check_rows(rows)
    recorded: list[Recorded] = []
    first: dict[Recorded, int] = {}
    for index, row in enumerate(rows):
        if index in reasons:
            continue
        each = Recorded(Item(*parse_item_id(row["item_id"])), _replies(row), path.name, index)
        if first.setdefault(each, index) != index:
            reasons[index] = f"says the same as row {first[each]}"
        else:
            recorded.append(each)
    return rows, recorded, [Refusal(path.name, index, reasons[index]) for index in sorted(reasons)]


def read_files(
    paths: Sequence[Path], cfg: RunConfig, *, drop_refused: bool
) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """(rows to learn from, refused ones), held against the item lists of the run.

    Errors: DataError where one is refused and not dropped, or where none is left.
    """
    kept: list[dict[str, Any]] = []
    refusals: list[Refusal] = []
    splits: dict[str, Splits] = {}
    first: dict[Recorded, Recorded] = {}
    for path in paths:
        rows, recorded, refused = read_file(path)
        for env in sorted({each.item.env for each in recorded} - splits.keys()):
            # else its rows are refused one by one
            if not cfg.data.path.is_dir() or has_lists(cfg.data.path, env):
                splits[env] = load_splits(
                    cfg.data.path,
                    env,
                    validation_fraction=cfg.data.validation_fraction,
                    seed=cfg.seed,
                )
        refused += outside(recorded, splits)
        earlier = [(each, first.setdefault(each, each)) for each in recorded]
        refused += [
            Refusal(each.file, each.row, f"says the same as {one.where}")
            for each, one in earlier
            if one is not each
        ]
        left_out = {refusal.row for refusal in refused}
        kept += [row for index, row in enumerate(rows) if index not in left_out]
        refusals += sorted(refused, key=lambda refusal: refusal.row)
    if not drop_refused:
        _refuse(refusals, "correct them, or leave them out with --drop-refused")
    if not kept:
        _refuse(refusals, "nothing is left to learn from")
    return kept, refusals


def outside(recorded: Sequence[Recorded], splits: Mapping[str, Splits]) -> list[Refusal]:
    """Those whose item is not trained on: held out for the test, or in no list. splits: by
    environment.
    """
    refusals = []
    tests = {item.item_id for part in splits.values() for item in part.test}
    known = {item.item_id for part in splits.values() for item in (*part.train, *part.validation)}
    for each in recorded:
        if each.item.env not in splits:
            refusals.append(
                Refusal(each.file, each.row, f"there are no item lists of {each.item.env}")
            )
        elif each.item.item_id in tests:
            refusals.append(
                Refusal(
                    each.file,
                    each.row,
                    f"{each.item.item_id} is a test item; learning from it, the test is not"
                    " held out",
                )
            )
        elif each.item.item_id not in known:
            refusals.append(
                Refusal(
                    each.file,
                    each.row,
                    f"{each.item.item_id} is not in the train list of {each.item.env}",
                )
            )
    return refusals


def _refuse(refusals: Sequence[Refusal], advice: str) -> None:
    """Errors: DataError with the first few, where there are any."""
    if refusals:
        more = f" and {len(refusals) - _SHOWN} more" if len(refusals) > _SHOWN else ""
        raise DataError(f"{'; '.join(map(str, refusals[:_SHOWN]))}{more}; {advice}")


def load_trajectories(folder: Path, splits: Mapping[str, Splits]) -> list[Recorded]:
    """Of each environment of `splits`, all that its file in the folder says of train items.
    Those of validation items are left out.

    Errors: DataError where a file is missing, or where a row cannot be learned from.
    """
    result: list[Recorded] = []
    for env, part in splits.items():
        path = _file_of(folder, env)
        _, recorded, refusals = read_file(path)
        foreign = [
            Refusal(each.file, each.row, f"is of {each.item.env}")
            for each in recorded
            if each.item.env != env
        ]
        _refuse([*refusals, *foreign], "import them anew, see `agentgym data import-trajectories`")
        _refuse(
            outside(recorded, {env: part}),
            "import them anew with --drop-refused: the lists have changed since",
        )
        trained = {item.item_id for item in part.train}
        kept = [each for each in recorded if each.item.item_id in trained]
        if not kept:
            raise DataError(f"{path} holds no trajectory of a train item of {env}")
        result += kept
    return result


def trajectories_digest(folder: Path, *envs: str) -> str:
    """sha256 over the bytes of the files a run reads, without looking inside.
    Errors: DataError where they are not there.
    """
    digest = hashlib.sha256()
    for env in envs:
        digest.update(hashlib.sha256(_file_of(folder, env).read_bytes()).digest())
    return digest.hexdigest()


def input_digest(cfg: RunConfig) -> str:
    """Of all data files a run reads. Errors: DataError where one is not there."""
    lists = data_digest(cfg.data.path, *cfg.env_weights)
    if cfg.warm_start.source != "trajectories":
        return lists
    return hashlib.sha256(
        f"{lists}{trajectories_digest(cfg.data.trajectories, *cfg.env_weights)}".encode()
    ).hexdigest()


def _file_of(folder: Path, env: str) -> Path:
    path = folder / FILE.format(env=env)
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; bring it with `agentgym data import-trajectories` or `dvc pull"
            f" {folder}.dvc`, or set warm_start.source to expert"
        )
    return path


def encode(recorded: Sequence[Recorded]) -> bytes:
    """Equal trajectories give equal bytes; `decode` gives equal ones back."""
    return json.dumps([each.to_json() for each in recorded], separators=(",", ":")).encode()


def decode(data: bytes) -> list[Recorded]:
    """Errors: ValueError or KeyError where `encode` did not write it."""
    return [
        Recorded(Item(*parse_item_id(row["item_id"])), tuple(row["replies"]))
        for row in json.loads(data)
    ]


def chosen(
    recorded: Sequence[Recorded], weights: Mapping[str, float], order: Sequence[int], most: int
) -> list[Recorded]:
    """The first `most`, environments taking turns by weight, all of an item together.

    order: of the items as they are first met, a permutation of as many numbers.
    """
    groups: dict[Item, list[Recorded]] = {}
    for each in recorded:
        groups.setdefault(each.item, []).append(each)
    items = list(groups)
    return [
        each
        for item in interleave([items[index] for index in order], weights)
        for each in groups[item]
    ][:most]


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """One file for each environment, in the layout they came in. Result: rows, by environment."""
    folder.mkdir(parents=True, exist_ok=True)
    by_env: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_env.setdefault(parse_item_id(row["item_id"])[0], []).append(row)
    for env, own in by_env.items():
        text = json.dumps(
            [{"item_id": row["item_id"], "conversations": row["conversations"]} for row in own],
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
    """Its messages, without a system text; what is no object is a message that says nothing."""
    said = row.get("conversations")
    messages = (
        [message if isinstance(message, dict) else {} for message in said]
        if isinstance(said, list)
        else []
    )
    return messages[1:] if messages and messages[0].get("from") == "system" else messages


def _first(row: Mapping[str, Any]) -> int:
    """Place of the first observation: after an exchange that is not to be learned, the task's
    instructions and a promise to follow it.
    """
    said = _conversation(row)
    return 2 if len(said) > 1 and said[1].get("loss") is False else 0


def _replies(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(message["value"] for message in _conversation(row)[_first(row) + 1 :: 2])


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Reasons, by row."""
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
    told: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "item_id": lambda row: (
            f"item_id {json.dumps(row.get('item_id'))[:80]} is not `<env>_<index>`"
        ),
        "conversations": lambda row: (
            f"conversations is {json.dumps(row.get('conversations'))[:40]}, not a list"
        ),
        "replies": lambda row: "holds no reply of the agent",
    }
    return {
        index: told[check](rows[index])
        for check in reversed(told)
        for index in _failures(schema, table, check)
    }


def _check_messages(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Reasons, by row: of its first message that is not as it must be."""
    import pandas as pd
    import pandera.pandas as pa

    said = [
        (index, place, message)
        for index, row in enumerate(rows)
        for place, message in enumerate(_conversation(row))
    ]
    table = pd.DataFrame(
        {
            "sender": [str(message.get("from")) for _, _, message in said],
            "expected": ["gpt" if place % 2 else "human" for _, place, _ in said],
            "length": [_length(message.get("value")) for _, _, message in said],
            "is_action": [
                bool(place % 2) and place > _first(rows[index]) for index, place, _ in said
            ],
            "loss": [json.dumps(message.get("loss")) for _, _, message in said],
        }
    ).astype({"sender": str, "expected": str, "length": int, "is_action": bool, "loss": str})
    schema = pa.DataFrameSchema(
        {
            "sender": pa.Column(str, pa.Check.isin(["human", "gpt"], error="sender")),
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
    told: dict[str, Callable[[Mapping[str, Any]], str]] = {
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
    found = [(at, check) for check in told for at in _failures(schema, table, check)]
    reasons: dict[int, str] = {}
    for at, check in sorted(found, key=lambda each: each[0]):
        index, place, message = said[at]
        reasons.setdefault(index, f"message {place} {told[check](message)}")
    return reasons


def _task_id(item_id: Any) -> int:
    """-1 for what is no item's id."""
    env, task_id = parse_item_id(item_id) if isinstance(item_id, str) else ("", -1)
    return task_id if re.fullmatch("[a-z0-9-]+", env) else -1


def _length(value: Any) -> int:
    """In characters; -1 for what is no text, half a surrogate pair too."""
    try:
        return len(value) if isinstance(value, str) and value.encode() is not None else -1
    except UnicodeEncodeError:
        return -1


def _failures(schema: Any, table: Any, check: str) -> list[int]:
    """Places in the table where the check of this name fails."""
    import pandera.pandas as pa

    try:
        schema.validate(table, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases
        return sorted(set(cases.loc[cases["check"].eq(check), "index"].astype(int)))
    return []
