"""An evaluation in the store: one step whose commits are chunks of finished episodes.

The first commit says what is asked, later ones add episodes and attempts that failed, the last one
the result. Who starts it again finds out from them what is owed: nothing that counts is played
twice, and nothing is lost but what had not been committed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.config import ConfigError
from agentgym.evaluation.result import Result, ResultError, Slot
from agentgym.records import TRAJECTORIES, decode_trajectories, encode_line, joined
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore, StepWriter
from agentgym.types import Trajectory

STEP = "evaluation"
PLAN, ATTEMPTS = "plan.json", "attempts.jsonl.gz"
RESULT = "result.json"

Key = tuple[str, str, int]  # environment, item, sample


def key_of(slot: Slot) -> Key:
    return slot.env, slot.item_id, slot.sample


def slot_of(trajectory: Trajectory) -> Key:
    return trajectory.item.env, trajectory.item.item_id, trajectory.sample


@dataclass
class Ledger:
    """What became of every slot so far, and what of it is not durable yet."""

    writer: StepWriter
    identity: Mapping[str, Any]
    slots: dict[Key, Slot]
    about: dict[str, Any]
    commit_every_s: float
    chunk_episodes: int
    wall_s: float = 0.0  # of processes before this one
    num_counted: int = 0  # slots that count, of any process
    num_failed: int = 0  # slots that failed for good in this process
    last_error: str = ""
    # encoded as they come: a thread that encodes many keeps the loop from what feeds the servers
    _finished: list[bytes] = field(default_factory=list)
    _failed: list[bytes] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _committed_at: float = field(default_factory=time.monotonic)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(
        cls,
        store: RunStore,
        writer: StepWriter,
        identity: Mapping[str, Any],
        slots: Sequence[Slot],
        about: Mapping[str, Any],
        **pace: Any,
    ) -> Ledger:
        """What was committed before is read; the plan is committed where nothing was."""
        before = store.history(STEP, writer.key)
        ledger = cls(
            writer,
            identity,
            {key_of(slot): slot for slot in slots},
            dict(about),
            **pace,
            wall_s=before[-1].timings.get("wall_s", 0.0) if before else 0.0,
        )
        if before:
            replay(store, before, ledger.slots)
            ledger.num_counted = sum(slot.counts for slot in ledger.slots.values())
        else:
            ledger._commit(done=False, records={PLAN: plan_bytes(slots, ledger.about)})
        return ledger

    @property
    def owed(self) -> list[Slot]:
        """Slots that do not count yet, in order."""
        return [slot for slot in self.slots.values() if not slot.counts]

    def failed(self, trajectory: Trajectory) -> None:
        """An attempt that is followed by another."""
        self._failed.append(encode_line(trajectory))
        self._note(trajectory)

    def finished(self, trajectory: Trajectory) -> Slot:
        """The last attempt at a slot. Result: the slot."""
        self._finished.append(encode_line(trajectory))
        slot = self._note(trajectory)
        if not slot.counts:
            self.num_failed += 1
            self.last_error = f"{slot.item_id} sample {slot.sample}: {slot.failed[-1].error}"
        return slot

    def _note(self, trajectory: Trajectory) -> Slot:
        key = slot_of(trajectory)
        before, after = self.slots[key], self.slots[key].played(trajectory)
        self.slots[key] = after
        self.num_counted += after.counts - before.counts
        return after

    @property
    def is_due(self) -> bool:
        waiting = len(self._finished)
        late = time.monotonic() - self._committed_at >= self.commit_every_s
        return waiting >= self.chunk_episodes or (late and bool(waiting or self._failed))

    def commit(self) -> None:
        """Make what is finished durable, if there is any. Errors: Fenced, StoreFull."""
        self.write(*self.take())

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(attempts that failed, finished episodes) that are not durable yet, for `write`."""
        taken = self._failed, self._finished
        self._failed, self._finished = [], []
        self._committed_at = time.monotonic()
        return taken

    def write(self, failed: list[bytes], finished: list[bytes]) -> None:
        """One chunk; it may run beside further episodes. Errors: Fenced, StoreFull."""
        chunk = {ATTEMPTS: failed, TRAJECTORIES: finished}
        records = {name: joined(own) for name, own in chunk.items() if own}
        if records:
            self._commit(done=False, records=records)

    def conclude(self, result: Result, *, done: bool) -> Manifest:
        """Commit the result; done: the same question is answered from now on."""
        self.commit()
        headline = {name: own["summary"] for name, own in result.numbers.items()}
        return self._commit(
            done=done,
            records={"clock.json": result.clock_bytes()},
            blobs={RESULT: result.to_bytes()},
            results={"coverage": result.coverage, "outcomes": result.outcomes, "envs": headline},
        )

    @property
    def elapsed_s(self) -> float:
        """Of all processes at this evaluation."""
        return self.wall_s + time.perf_counter() - self._began

    def _commit(
        self,
        *,
        done: bool,
        records: Mapping[str, bytes],
        blobs: Mapping[str, bytes] | None = None,
        results: dict[str, Any] | None = None,
    ) -> Manifest:
        with self._one_at_a_time:  # one that was interrupted may still be writing
            manifest = self.writer.commit(
                done=done,
                state={"num_slots": len(self.slots), "num_counted": self.num_counted},
                parents={},
                config=dict(self.identity),
                blobs=blobs or {},
                records=records,
                results=results or {},
                timings={"wall_s": self.elapsed_s},
            )
        self._committed_at = time.monotonic()
        return manifest


def plan_bytes(slots: Sequence[Slot], about: Mapping[str, Any]) -> bytes:
    rows = [[slot.env, slot.item_id, slot.sample, slot.task] for slot in slots]
    return json.dumps({"about": about, "slots": rows}, separators=(",", ":")).encode()


def replay(store: RunStore, commits: Sequence[Manifest], slots: dict[Key, Slot]) -> None:
    """Give the slots what the commits hold, in its order."""
    for trajectory in attempts_of(store, commits):
        key = slot_of(trajectory)
        slots[key] = slots[key].played(trajectory)


def attempts_of(store: RunStore, commits: Sequence[Manifest]) -> Iterator[Trajectory]:
    """Every attempt on record, one chunk in memory at a time."""
    for commit in commits:
        for name in (ATTEMPTS, TRAJECTORIES):
            if name in commit.records:
                yield from decode_trajectories(store.read(commit, name))


def find(store: RunStore, digest: str) -> Manifest:
    """The newest commit of the evaluation whose digest begins so. Errors: ConfigError."""
    heads = [head for head in store.heads() if head.step == STEP]
    matching = [head for head in heads if head.key.startswith(digest)] if digest else heads
    if len(matching) != 1:
        there = ", ".join(head.key[:12] for head in matching or heads) or "none"
        what = "is the beginning of several" if matching else "is none"
        raise ConfigError(f"evaluation {digest or '(none named)'} {what}; there are: {there}")
    return matching[0]


def stored_slots(store: RunStore, head: Manifest) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    """(every slot as far as it is, what is told of the evaluation). Errors: ResultError."""
    planned, about = planned_slots(store, head)
    slots = {key_of(slot): slot for slot in planned}
    replay(store, store.history(STEP, head.key), slots)
    return tuple(slots.values()), about


def planned_slots(store: RunStore, head: Manifest) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    """As `stored_slots`, before any was played."""
    commits = store.history(STEP, head.key)
    if not commits or PLAN not in commits[0].records:
        raise ResultError(f"evaluation {head.key[:12]} has no plan; it is none of this version")
    plan = json.loads(store.read(commits[0], PLAN))
    return tuple(Slot(*row) for row in plan["slots"]), plan["about"]
