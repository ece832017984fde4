"""An episode's row in the index: columns to filter and sort by, and its words for the search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from agentgym.store.runstore import FOLDER
from envs.plain import plain
from envs.wire import FAMILY, INVALID

# files of a commit that contain episodes, and the letter of each in an address
FILES = ("trajectories.jsonl.gz", "attempts.jsonl.gz", "demos.jsonl.gz")
LETTERS = "tad"
TOKENIZER = "tokenizer.json"  # in a commit with weights: the tokenizer's files, by name
DECISION = "decision.json"  # in a commit: the version that gets a model's alias, and why
MAX_TEXT = 20_000  # searched characters of one text
MAX_TEXTS = 400_000  # searched characters of one episode
MAX_ERROR = 300

_ADDRESS = re.compile(
    r"(?P<folder>[a-z0-9-]{1,140})\.(?P<seq>\d{1,9})\.(?P<file>[tad])(?P<line>\d{1,9})"
)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Location of an episode in the store; its text is a permanent name, in any index."""

    folder: str  # of the step in the store
    seq: int  # of the commit
    file: int  # index into FILES
    line: int  # from 0

    def __str__(self) -> str:
        return f"{self.folder}.{self.seq}.{LETTERS[self.file]}{self.line}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address's text. Errors: ValueError."""
        match = _ADDRESS.fullmatch(text)
        if not match or not FOLDER.fullmatch(match["folder"]):
            raise ValueError(f"{text[:80]!r} names no episode")
        file = LETTERS.index(match["file"])
        return cls(match["folder"], int(match["seq"]), file, int(match["line"]))


@dataclass(frozen=True, slots=True)
class Row:
    """An episode without its content. Its fields are the columns of the index."""

    step_id: int
    seq: int
    file: int
    line: int
    start: int  # first byte of its line in the unpacked file
    size: int  # bytes of the line
    env: str
    task_id: int
    item: str
    split: str
    family: str  # named by the environment; empty: it names none
    sample: int
    at: int  # optimizer step that it was played for, or whose weights played it
    version: int  # of the newest weights that sampled a turn
    oldest: int  # version of the oldest weights that sampled a turn
    status: str
    success: int
    reward: float | None
    advantage: float | None  # mean over its action tokens; None: not recorded
    turns: int
    tokens: int
    said: int  # tokens that the policy sampled
    invalid: int  # actions that the environment did not carry out
    max_turns: int
    temperature: float
    attempts: int
    excluded: str  # why it is not in the loss; empty: it is, or no update used its step
    kept: int  # 1: the numbers of its tokens are recorded
    began: float  # seconds since 1970
    wall: float  # seconds
    error: str


COLUMNS = tuple(column.name for column in fields(Row))


def row_of(record: Mapping[str, Any], location: Sequence[int], committed: float) -> Row:
    """Return the row of a record.

    location: the first six columns; committed: time of its commit, for records without times.
    Errors: KeyError, TypeError, ValueError if it is no record.
    """
    item, turns = record["item"], record["turns"]
    learned = record.get("learned") or {}
    infos = [turn.get("info") or {} for turn in turns]
    families = [str(info[FAMILY]) for info in infos if info.get(FAMILY) is not None]
    versions = [int(turn.get("version", 0)) for turn in turns]
    advantages, timing = learned.get("advantages") or (), record.get("timing") or {}
    reward, step = record["reward"], int(record["step"])
    step_id, seq, file, line, start, size = location
    return Row(
        step_id=step_id,
        seq=seq,
        file=file,
        line=line,
        start=start,
        size=size,
        env=plain(str(item["env"])),
        task_id=int(item["task_id"]),
        item=plain(f"{item['env']}_{item['task_id']}"),
        split=plain(str(item.get("split", "train"))),
        family=plain(families[-1])[:80] if families else "",
        sample=int(record["sample"]),
        at=step or max(versions, default=0),
        version=max(versions, default=0),
        oldest=min(versions, default=0),
        status=plain(str(record["status"])),
        success=int(bool(record["success"])),
        reward=None if reward is None else float(reward),
        advantage=sum(advantages) / len(advantages) if advantages else None,
        turns=len(turns),
        tokens=len(record["input_ids"]),
        said=sum(map(bool, record["action_mask"])),
        invalid=sum(bool(info.get(INVALID)) for info in infos),
        max_turns=int(record["max_turns"]),
        temperature=float(record.get("temperature", 1.0)),
        attempts=int(record.get("num_attempts", 1)),
        excluded=plain(str(learned.get("excluded", ""))),
        kept=int(bool(learned.get("logprobs"))),
        began=float(timing.get("began_s") or committed),
        wall=float(timing.get("wall_s", 0.0)),
        error=plain(str(record.get("error") or ""))[:MAX_ERROR],
    )


def words_of(record: Mapping[str, Any]) -> str:
    """Return all text of an episode for the search, cut at MAX_TEXT and MAX_TEXTS."""
    pieces, room = [], MAX_TEXTS
    for text in _texts(record):
        piece = text[: min(MAX_TEXT, room)]
        pieces.append(piece)
        room -= len(piece)
        if room <= 0:
            break
    return plain("\n".join(pieces))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    yield str(record["first_observation"])
    for turn in record["turns"]:
        yield str(turn.get("reply") or turn["action"])
        yield str(turn["observation"])
    yield str(record.get("error") or "")
