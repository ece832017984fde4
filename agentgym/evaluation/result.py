"""What an evaluation leaves: one row for each (environment, item, sample), whatever became of it,
and a digest that names what was asked.

A slot is one (environment, item, sample). Every slot that was asked for is there: one that has not
been played has no outcome, one that failed has its attempts, and neither is ever a reward of 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Item, Status, Trajectory, Usage, flat
from envs.wire import FAMILY, INVALID

SCHEMA_VERSION = 1
RESULT, CLOCK = "result.json", "clock.json"  # files of a result; the second one holds all times


class ResultError(ValueError):
    """What was read is no result of ours, or one of a later version."""


class Outcome(StrEnum):
    """What became of a slot. The first two enter the score; the others never are a 0."""

    SCORED = "scored"  # the environment ended the episode
    TRUNCATED = "truncated"  # it was cut: turns, context, or the simulator's own limit
    ENV_ERROR = "env_error"
    GRADER_ERROR = "grader_error"  # it was played, and nobody could judge it
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"  # the policy could not go on: its endpoint, or a limit of cost

    @property
    def counts(self) -> bool:
        return self in (Outcome.SCORED, Outcome.TRUNCATED)


OUTCOME_OF = {
    Status.TERMINATED: Outcome.SCORED,
    Status.MAX_TURNS: Outcome.TRUNCATED,
    Status.MAX_TOKENS: Outcome.TRUNCATED,
    Status.ENV_LIMIT: Outcome.TRUNCATED,
    Status.ENV_ERROR: Outcome.ENV_ERROR,
    Status.GRADER_ERROR: Outcome.GRADER_ERROR,
    Status.TIMEOUT: Outcome.TIMEOUT,
    Status.INTERRUPTED: Outcome.INTERRUPTED,
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A try at a slot that failed; none is ever dropped."""

    outcome: Outcome
    error: str
    num_turns: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class Slot:
    """One (environment, item, sample) and what became of it."""

    env: str
    item_id: str
    sample: int  # 0: greedy; samples are counted from 1
    task: str | None = None  # digest of the task, equal for equal ones; None: not known
    outcome: Outcome | None = None  # None: not played yet
    success: bool = False
    reward: float | None = None  # sum of the turns'; None where nothing counts
    num_turns: int = 0  # of the attempt that counts, or the last one
    family: str | None = None  # as the environment says
    num_invalid: int | None = None  # actions it did not carry out; None: it does not say
    usage: Usage = field(default_factory=Usage)  # of that attempt
    info: Mapping[str, Any] = field(default_factory=dict)  # the environment's at the end
    failed: tuple[Attempt, ...] = ()  # in order; of a slot that failed for good, all
    wall_s: float = field(default=0.0, compare=False)

    @property
    def counts(self) -> bool:
        return self.outcome is not None and self.outcome.counts

    @property
    def total_usage(self) -> Usage:
        """Over all attempts."""
        return sum((each.usage for each in self.failed if not self._is_last(each)), self.usage)

    def _is_last(self, attempt: Attempt) -> bool:
        return not self.counts and attempt is self.failed[-1]

    def played(self, trajectory: Trajectory) -> Slot:
        """With one more attempt, the latest."""
        outcome, usage = OUTCOME_OF[trajectory.status], usage_of(trajectory)
        failed, turns = self.failed, trajectory.turns
        if not outcome.counts:
            attempt = Attempt(outcome, trajectory.error or "", len(turns), usage)
            failed = (*failed, attempt)
        infos = [turn.info for turn in turns]
        family = family_of(trajectory)
        says = family is not None or any(INVALID in info for info in infos)
        return Slot(
            env=self.env,
            item_id=self.item_id,
            sample=self.sample,
            task=self.task,
            outcome=outcome,
            success=trajectory.success,
            reward=trajectory.reward,
            num_turns=len(turns),
            family=self.family if family is None else family,
            num_invalid=sum(bool(info.get(INVALID)) for info in infos) if says else None,
            usage=usage,
            info=infos[-1] if infos else {},
            failed=failed,
            wall_s=self.wall_s + float(trajectory.timing.get("wall_s", 0.0)),
        )

    def to_row(self) -> list[Any]:
        """In the order of COLUMNS, without the clock."""
        row = [getattr(self, name) for name in COLUMNS]
        row[COLUMNS.index("usage")] = list(flat(self.usage).values())
        row[COLUMNS.index("failed")] = [
            [each.outcome, each.error, each.num_turns, list(flat(each.usage).values())]
            for each in self.failed
        ]
        return row

    @classmethod
    def from_row(cls, row: Sequence[Any], wall_s: float = 0.0) -> Self:
        """The inverse of `to_row`."""
        given = dict(zip(COLUMNS, row, strict=True))
        given["outcome"] = None if given["outcome"] is None else Outcome(given["outcome"])
        given["usage"] = Usage(*given["usage"])
        given["failed"] = tuple(
            Attempt(Outcome(outcome), error, turns, Usage(*usage))
            for outcome, error, turns, usage in given["failed"]
        )
        return cls(**given, wall_s=wall_s)


COLUMNS = tuple(name for name in Slot.__dataclass_fields__ if name != "wall_s")


def usage_of(trajectory: Trajectory) -> Usage:
    """As its policy counted, or by the tokens on record."""
    if trajectory.usage is not None:
        return trajectory.usage
    turns = [turn for turn in trajectory.turns if turn.end]
    return Usage(
        num_calls=len(turns),
        input_tokens=sum(turn.start for turn in turns),
        output_tokens=sum(turn.end - turn.start for turn in turns),
        num_cache_untold=len(turns),
    )


@dataclass(frozen=True)
class Result:
    """An evaluation, whole or as far as it is."""

    # what was asked, and nothing else: policy, items, samples, protocol, prompts, versions
    identity: Mapping[str, Any]
    slots: tuple[Slot, ...]  # environments in the protocol's order, items in theirs, samples up
    numbers: Mapping[str, Any] = field(default_factory=dict)  # `agentgym.evaluation.score`
    about: Mapping[str, Any] = field(default_factory=dict)  # for people: names, warnings
    clock: Mapping[str, Any] = field(default_factory=dict, compare=False)  # seconds, rates
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """64 hex digits; equal for equal questions, whatever came out."""
        return digest_of(self.identity)

    @cached_property
    def envs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.env for slot in self.slots))

    def of(self, env: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.env == env)

    @property
    def coverage(self) -> float:
        """Slots that count, of those asked for; see also `table`."""
        return coverage_of(self.slots)

    @property
    def is_complete(self) -> bool:
        """Whether every slot has been played, well or not."""
        return all(slot.outcome is not None for slot in self.slots)

    @property
    def outcomes(self) -> dict[str, int]:
        """How many slots have each outcome; `not_played` for those without one."""
        found = Counter(slot.outcome for slot in self.slots)
        return {
            **{str(each): found[each] for each in Outcome},
            "not_played": found[None],
        }

    @property
    def usage(self) -> Usage:
        """Over all attempts at all slots."""
        return sum((slot.total_usage for slot in self.slots), Usage())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types without any time of a clock: two runs of one question that came to
        the same have equal ones.
        """
        return {
            "schema_version": self.schema_version,
            "digest": self.digest,
            "identity": self.identity,
            "about": self.about,
            "coverage": self.coverage,
            "outcomes": self.outcomes,
            "usage": flat(self.usage),
            "numbers": self.numbers,
            "columns": COLUMNS,
            "slots": [slot.to_row() for slot in self.slots],
        }

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False).encode()

    def clock_bytes(self) -> bytes:
        times = [round(slot.wall_s, 4) for slot in self.slots]
        return json.dumps({**self.clock, "wall_s": times}, separators=(",", ":")).encode()

    def save(self, folder: Path) -> None:
        """`result.json` and `clock.json`, into a folder that exists."""
        (folder / RESULT).write_bytes(self.to_bytes())
        (folder / CLOCK).write_bytes(self.clock_bytes())

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a folder or its `result.json`. Errors: ResultError."""
        file = path / RESULT if path.is_dir() else path
        clock = file.with_name(CLOCK)
        try:
            return cls.from_bytes(
                file.read_bytes(), clock.read_bytes() if clock.is_file() else b"{}", str(file)
            )
        except OSError as error:
            raise ResultError(f"{file} cannot be read: {error.strerror}") from None

    @classmethod
    def from_bytes(cls, data: bytes, clock: bytes = b"{}", where: str = "the result") -> Self:
        """Errors: ResultError."""
        try:
            tree, times = json.loads(data), json.loads(clock)
            version = tree["schema_version"]
            if version != SCHEMA_VERSION:
                raise ResultError(
                    f"{where} has schema_version {version!r}, this agentgym reads {SCHEMA_VERSION};"
                    " use the version that wrote it"
                )
            if tuple(tree["columns"]) != COLUMNS:
                raise ResultError(f"{where} has other columns than {', '.join(COLUMNS)}")
            walls = times.pop("wall_s", None) or [0.0] * len(tree["slots"])
            slots = tuple(map(Slot.from_row, tree["slots"], walls))
            result = cls(tree["identity"], slots, tree["numbers"], tree["about"], times)
            if result.digest != tree["digest"]:
                raise ResultError(f"{where} was changed: its digest is not that of its identity")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ResultError):
                raise
            raise ResultError(
                f"{where} is no result of an evaluation: {type(error).__name__} {error}"
            ) from None
        return result


def family_of(trajectory: Trajectory) -> str | None:
    """What kind of task its item is, as the environment last told; None: it told nothing."""
    told = [turn.info[FAMILY] for turn in trajectory.turns if turn.info.get(FAMILY) is not None]
    return str(told[-1]) if told else None


def digest_of(identity: Mapping[str, Any]) -> str:
    return sha256(canonical_json(identity))


def expected_slots(
    items: Mapping[str, Sequence[Item]],
    samples: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str | None]],
) -> tuple[Slot, ...]:
    """Every slot that is asked for, none played. By environment: its items, the numbers of their
    samples, and the digest of each item's task.
    """
    return tuple(
        Slot(env, item.item_id, sample, task)
        for env, its in items.items()
        for item, task in zip(its, tasks[env], strict=True)
        for sample in samples[env]
    )


def coverage_of(slots: Sequence[Slot]) -> float:
    """Share of the slots that count; 1 of none."""
    return sum(slot.counts for slot in slots) / len(slots) if slots else 1.0


def outcome_table(
    slots: Iterable[Slot],
) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.float64]]:
    """Of one environment: item ids [I], greedy [I] and samples [I, n]: success as 1 or 0, NaN
    where the slot does not count. An evaluation without greedy episodes has NaN in all of them.
    """
    slots = list(slots)
    rows = {item: row for row, item in enumerate(dict.fromkeys(slot.item_id for slot in slots))}
    num_samples = max((slot.sample for slot in slots), default=0)
    table = np.full((len(rows), 1 + num_samples), np.nan)
    for slot in slots:
        if slot.counts:
            table[rows[slot.item_id], slot.sample] = float(slot.success)
    return tuple(rows), table[:, 0], table[:, 1:]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two identities ask another question than who played: dotted paths, each with both
    values; empty: their results compare.
    """
    return _differences(
        {name: value for name, value in ours.items() if name != "policy"},
        {name: value for name, value in theirs.items() if name != "policy"},
        "",
    )


def _differences(ours: Any, theirs: Any, place: str) -> list[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        found = []
        for name in dict.fromkeys([*ours, *theirs]):
            found += _differences(ours.get(name), theirs.get(name), f"{place}.{name}".lstrip("."))
        return found
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) == len(theirs):
            pairs = enumerate(zip(ours, theirs, strict=True))
            return [line for i, both in pairs for line in _differences(*both, f"{place}[{i}]")]
    elif ours == theirs:
        return []
    shown = (json.dumps(each, default=str)[:60] for each in (ours, theirs))
    return [f"{place}: {' and '.join(shown)}"]
