"""What the index keeps of an episode: the columns people filter and sort by, and the words they
search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from agentgym.store.runstore import FOLDER
from envs.plain import plain
from envs.wire import FAMILY, INVALID

# of a commit, in this order: what episodes lie in, and the letter that stands for it in an address
FILES = ("trajectories.jsonl.gz", "attempts.jsonl.gz", "demos.jsonl.gz")
LETTERS = "tad"
TOKENIZER = "tokenizer.json"  # of a commit with weights: its files, by name
DECISION = "decision.json"  # of a commit: who holds a model's alias from here on, and why
MAX_TEXT = 20_000  # characters of one text that are searched
MAX_TEXTS = 400_000  # of one episode
MAX_ERROR = 300

_ADDRESS = re.compile(
    r"(?P<folder>[a-z0-9-]{1,140})\.(?P<seq>\d{1,9})\.(?P<file>[tad])(?P<line>\d{1,9})"
)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where an episode lies; as text it is its permanent name, in this index and in any other."""

    folder: str  # of the step in the store
    seq: int  # of the commit
    file: int  # index into FILES
    line: int  # from 0

    def __str__(self) -> str:
        return f"{self.folder}.{self.seq}.{LETTERS[self.file]}{self.line}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Errors: ValueError."""
        found = _ADDRESS.fullmatch(text)
        if not found or not FOLDER.fullmatch(found["folder"]):
            raise ValueError(f"{text[:80]!r} names no episode")
        file = LETTERS.index(found["file"])
        return cls(found["folder"], int(found["seq"]), file, int(found["line"]))


@dataclass(frozen=True, slots=True)
class Row:
    """An episode without its content. Its fields are the columns of the index."""

    step_id: int
    seq: int
    file: int
    line: int
    start: int  # byte of its line in the unpacked file,
    size: int  # and bytes of it
    env: str
    task_id: int
    item: str
    split: str
    family: str  # as the environment says; empty: it does not
    sample: int
    at: int  # optimizer step it was played for, or whose weights played it
    version: int  # of the newest weights that sampled a turn,
    oldest: int  # and of the oldest
    status: str
    success: int
    reward: float | None
    advantage: float | None  # mean over its action tokens, where they are kept
    turns: int
    tokens: int
    said: int  # tokens that the policy sampled
    invalid: int  # actions that the environment did not carry out
    max_turns: int
    temperature: float
    attempts: int
    excluded: str  # why it is not in the loss; empty: it is, or nothing was learned from it
    kept: int  # whether the numbers of its tokens are there
    began: float  # seconds since 1970
    wall: float  # seconds
    error: str


COLUMNS = tuple(each.name for each in fields(Row))


def row_of(record: Mapping[str, Any], place: Sequence[int], committed: float) -> Row:
    """place: the first six columns; committed: when its commit was made, for records without
    times. Errors: KeyError, TypeError, ValueError where it is no record.
    """
    item, turns = record["item"], record["turns"]
    learned = record.get("learned") or {}
    infos = [turn.get("info") or {} for turn in turns]
    families = [str(info[FAMILY]) for info in infos if info.get(FAMILY) is not None]
    versions = [int(turn.get("version", 0)) for turn in turns]
    advantages, timing = learned.get("advantages") or (), record.get("timing") or {}
    reward, step = record["reward"], int(record["step"])
    step_id, seq, file, line, start, size = place
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
    """All that was said in it, for the search; very long texts up to a limit."""
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
