"""Result of an evaluation: one row for each slot (environment, item, sample), and a digest of the
question. A slot that has not been played has no outcome, one that failed has its attempts, and
neither is ever a reward of 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Item, Status, Trajectory, Usage, flat
from envs.wire import FAMILY, INVALID

SCHEMA_VERSION = 1
RESULT, CLOCK = "result.json", "clock.json"  # files of a result; the second one has all times


class ResultError(ValueError):
    """Error for a file that is no result, was changed, or has another version's format."""


class Outcome(StrEnum):
    """Outcome of a slot. The first two enter the score, the others do not, not even as 0."""

    SCORED = "scored"  # the environment ended the episode
    TRUNCATED = "truncated"  # it was cut: turns, context, or the simulator's own limit
    ENV_ERROR = "env_error"
    GRADER_ERROR = "grader_error"  # it was played, but could not be graded
    TIMEOUT = "timeout"
    # the policy could not continue: its endpoint failed, or a limit of cost was reached
    INTERRUPTED = "interrupted"

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
    """A failed attempt at a slot; a slot keeps all of its failed attempts."""

    outcome: Outcome
    error: str
    num_turns: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class Slot:
    """One sample of one item, to be played once, and its outcome."""

    env: str
    item_id: str
    sample: int  # 0: greedy; samples are counted from 1
    task: str | None = None  # digest of the task, equal for equal tasks; None: not known
    outcome: Outcome | None = None  # None: not played yet
    success: bool = False
    reward: float | None = None  # sum of the turns' rewards; None if nothing counts
    num_turns: int = 0  # of the attempt that counts, or the last one
    family: str | None = None  # as the environment reports it
    num_invalid: int | None = None  # actions it did not carry out; None: it does not report them
    usage: Usage = field(default_factory=Usage)  # of that attempt
    info: Mapping[str, Any] = field(default_factory=dict)  # the environment's at the end
    failed: tuple[Attempt, ...] = ()  # in order; all of a slot's attempts if it failed for good
    wall_s: float = field(default=0.0, compare=False)

    @property
    def counts(self) -> bool:
        return self.outcome is not None and self.outcome.counts

    @property
    def total_usage(self) -> Usage:
        """Usage over all attempts."""
        # a slot that failed for good has the last attempt's usage as its own
        failed = self.failed if self.counts else self.failed[:-1]
        return sum((attempt.usage for attempt in failed), self.usage)

    def played(self, trajectory: Trajectory) -> Slot:
        """Return the slot after one more attempt: its outcome is now that of the trajectory."""
        outcome, usage = OUTCOME_OF[trajectory.status], usage_of(trajectory)
        failed, turns = self.failed, trajectory.turns
        if not outcome.counts:
            attempt = Attempt(outcome, trajectory.error or "", len(turns), usage)
            failed = (*failed, attempt)
        infos = [turn.info for turn in turns]
        family = family_of(trajectory)
        reports = family is not None or any(INVALID in info for info in infos)
        return replace(
            self,
            outcome=outcome,
            success=trajectory.success,
            reward=trajectory.reward,
            num_turns=len(turns),
            family=self.family if family is None else family,
            num_invalid=sum(bool(info.get(INVALID)) for info in infos) if reports else None,
            usage=usage,
            info=infos[-1] if infos else {},
            failed=failed,
            wall_s=self.wall_s + float(trajectory.timing.get("wall_s", 0.0)),
        )

    def to_row(self) -> list[Any]:
        """Return the values of COLUMNS, in their order; the time `wall_s` is not among them."""
        row = [getattr(self, name) for name in COLUMNS]
        row[COLUMNS.index("usage")] = list(flat(self.usage).values())
        row[COLUMNS.index("failed")] = [
            [attempt.outcome, attempt.error, attempt.num_turns, list(flat(attempt.usage).values())]
            for attempt in self.failed
        ]
        return row

    @classmethod
    def from_row(cls, row: Sequence[Any], wall_s: float = 0.0) -> Self:
        """Return the slot whose `to_row` gave this row. wall_s: seconds over all its attempts."""
        fields = dict(zip(COLUMNS, row, strict=True))
        fields["outcome"] = None if fields["outcome"] is None else Outcome(fields["outcome"])
        fields["usage"] = Usage(*fields["usage"])
        fields["failed"] = tuple(
            Attempt(Outcome(outcome), error, turns, Usage(*usage))
            for outcome, error, turns, usage in fields["failed"]
        )
        return cls(**fields, wall_s=wall_s)


COLUMNS = tuple(name for name in Slot.__dataclass_fields__ if name != "wall_s")


def usage_of(trajectory: Trajectory) -> Usage:
    """Return the usage that the policy counted; if it counted none, that of the recorded tokens."""
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
    """Result of an evaluation, also of one that is not finished."""

    # the question and nothing else: policy, items, samples, protocol, prompts, versions
    identity: Mapping[str, Any]
    # environments in the protocol's order, items in theirs, samples ascending
    slots: tuple[Slot, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)  # `agentgym.evaluation.numbers`
    about: Mapping[str, Any] = field(default_factory=dict)  # for people: names, warnings
    clock: Mapping[str, Any] = field(default_factory=dict, compare=False)  # seconds, rates
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """sha256 of `identity`, 64 hex digits; equal for equal questions, whatever the result."""
        return digest_of(self.identity)

    @cached_property
    def envs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.env for slot in self.slots))

    def of(self, env: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.env == env)

    @property
    def coverage(self) -> float:
        """Share of the slots that count."""
        return coverage_of(self.slots)

    @property
    def is_complete(self) -> bool:
        """True if every slot has an outcome, failed or not."""
        return all(slot.outcome is not None for slot in self.slots)

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of slots with each outcome; `not_played` for those without one."""
        counts = Counter(slot.outcome for slot in self.slots)
        return {str(out): counts[out] for out in Outcome} | {"not_played": counts[None]}

    @property
    def usage(self) -> Usage:
        """Usage over all attempts at all slots."""
        return sum((slot.total_usage for slot in self.slots), Usage())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types, without times: equal outcomes of a question give equal trees."""
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
        """Write `result.json` and `clock.json` into an existing folder."""
        (folder / RESULT).write_bytes(self.to_bytes())
        (folder / CLOCK).write_bytes(self.clock_bytes())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a result from a folder or its `result.json`, and times from the `clock.json` next to
        that, if there is one. Errors: ResultError.
        """
        file = path / RESULT if path.is_dir() else path
        clock = file.with_name(CLOCK)
        try:
            times = clock.read_bytes() if clock.is_file() else b"{}"
            return cls.from_bytes(file.read_bytes(), times, str(file))
        except OSError as error:
            raise ResultError(f"{file} cannot be read: {error.strerror}") from None

    @classmethod
    def from_bytes(cls, data: bytes, clock: bytes = b"{}", where: str = "the result") -> Self:
        """Read a result from its files' content. where: its name in errors. Errors: ResultError."""
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
    """Return the item's kind of task, as the environment last reported it; None: it did not."""
    families = [turn.info[FAMILY] for turn in trajectory.turns if turn.info.get(FAMILY) is not None]
    return str(families[-1]) if families else None


def digest_of(identity: Mapping[str, Any]) -> str:
    return sha256(canonical_json(identity))


def expected_slots(
    items: Mapping[str, Sequence[Item]],
    samples: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str | None]],
) -> tuple[Slot, ...]:
    """Return every slot of an evaluation, not yet played; all arguments are by environment.
    samples: their numbers; tasks: digest of each item's task, or None.
    """
    return tuple(
        Slot(env, item.item_id, sample, task)
        for env, its in items.items()
        for item, task in zip(its, tasks[env], strict=True)
        for sample in samples[env]
    )


def coverage_of(slots: Sequence[Slot]) -> float:
    """Share of the slots that count; 1 if there are none."""
    return sum(slot.counts for slot in slots) / len(slots) if slots else 1.0


def families_of(slots: Iterable[Slot]) -> tuple[str | None, ...]:
    """Return each item's family, in order of first appearance; None if its slots have none."""
    families: dict[str, str | None] = {}
    for slot in slots:
        families[slot.item_id] = families.get(slot.item_id) or slot.family
    return tuple(families.values())


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a line with path and both values for each difference of two identities.
    The policy is left out. Empty: the results can be compared.
    """
    ours, theirs = ({**side, "policy": None} for side in (ours, theirs))
    return _differences(ours, theirs, "")


def _differences(ours: Any, theirs: Any, path: str) -> list[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        lines = []
        for name in dict.fromkeys([*ours, *theirs]):
            lines += _differences(ours.get(name), theirs.get(name), f"{path}.{name}".lstrip("."))
        return lines
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) == len(theirs):
            pairs = enumerate(zip(ours, theirs, strict=True))
            return [line for i, both in pairs for line in _differences(*both, f"{path}[{i}]")]
    elif ours == theirs:
        return []
    shown = (json.dumps(value, default=str)[:60] for value in (ours, theirs))
    return [f"{path}: {' and '.join(shown)}"]
