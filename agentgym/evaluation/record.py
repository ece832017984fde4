"""An evaluation in the store: one step whose commits are chunks of finished episodes.

The first commit has the plan, later ones add episodes and attempts that failed, the last one the
result. A process that starts the evaluation again reads from them which slots are missing: a slot
that counts is never played twice, and only uncommitted episodes are lost.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.result import CLOCK, OUTCOME_OF, RESULT, Result, Slot, usage_of
from agentgym.records import ATTEMPTS, TRAJECTORIES, decode_trajectories, encode_line, joined
from agentgym.store.manifest import Manifest, canonical_json
from agentgym.store.runstore import RunStore
from agentgym.types import Trajectory, Usage, flat

STEP = "evaluation"  # of `agentgym evaluate`; evaluations of a run are steps of the run
PLAN = "plan.json"

Key = tuple[str, str, int]  # environment, item, sample


def key_of(slot: Slot) -> Key:
    return slot.env, slot.item_id, slot.sample


def slot_of(trajectory: Trajectory) -> Key:
    return trajectory.item.env, trajectory.item.item_id, trajectory.sample


@dataclass
class Ledger:
    """Outcome of every slot so far, and the attempts that are not yet durable."""

    # makes a chunk durable: takes done, state, records, blobs, results, wall_s
    make_commit: Callable[..., Manifest]
    identity: Mapping[str, Any]
    slots: dict[Key, Slot]
    about: Mapping[str, Any]
    commit_every_s: float
    chunk_episodes: int
    wall_s: float = 0.0  # of processes before this one
    num_counted: int = 0  # slots that count, of any process
    num_failed: int = 0  # slots that failed for good in this process
    last_error: str = ""
    # encoded one by one: a thread that encodes many at once would block the event loop that feeds
    # the servers
    _finished: list[bytes] = field(default_factory=list)
    _failed: list[bytes] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _committed_at: float = field(default_factory=time.monotonic)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(
        cls,
        store: RunStore,
        earlier: Sequence[Manifest],
        make_commit: Callable[..., Manifest],
        protocol: EvaluationProtocol,
        plan: Plan,
    ) -> Ledger:
        """Return the ledger as the `earlier` commits left it, with identity and `about` of their
        plan; if there are none, commit `plan`. make_commit: see the field.
        """
        ledger = cls(
            make_commit,
            plan.identity,
            {key_of(slot): slot for slot in plan.slots},
            plan.about,
            # commits by time would make two deterministic evaluations differ
            math.inf if protocol.deterministic else protocol.commit_every_s,
            protocol.chunk_episodes,
            earlier[-1].timings.get("wall_s", 0.0) if earlier else 0.0,
        )
        if earlier:
            recorded = read_plan(store, earlier[0])
            ledger.identity, ledger.about = recorded.identity, recorded.about
            replay(store, earlier, ledger.slots)
            ledger.num_counted = sum(slot.counts for slot in ledger.slots.values())
        else:
            ledger._commit(done=False, records={PLAN: plan.to_bytes()})
        # sort the keys, so that a resumed evaluation writes the same bytes
        ledger.identity = json.loads(canonical_json(ledger.identity))
        return ledger

    @property
    def owed(self) -> list[Slot]:
        """Slots that do not count yet, in order."""
        return [slot for slot in self.slots.values() if not slot.counts]

    def failed(self, trajectory: Trajectory) -> None:
        """Note a failed attempt that is followed by another; the next commit makes it durable."""
        self._failed.append(encode_line(trajectory))
        self._note(trajectory)

    def finished(self, trajectory: Trajectory) -> Slot:
        """Note the last attempt at a slot; the next commit makes it durable. Return the slot."""
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
        """Commit all attempts that are not yet durable, if any. Errors: Fenced, StoreFull."""
        self.write(*self.take())

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Remove and return (failed attempts, finished episodes) not yet durable, for `write`, and
        count the time to the next commit from now.
        """
        taken = self._failed, self._finished
        self._failed, self._finished = [], []
        self._committed_at = time.monotonic()
        return taken

    def write(self, failed: list[bytes], finished: list[bytes]) -> None:
        """Commit one chunk, unless it is empty. May run in a thread while further episodes are
        played. Errors: Fenced, StoreFull.
        """
        chunk = {ATTEMPTS: failed, TRAJECTORIES: finished}
        if records := {name: joined(lines) for name, lines in chunk.items() if lines}:
            self._commit(done=False, records=records)

    def conclude(self, result: Result, results: dict[str, Any], *, done: bool) -> Manifest:
        """Commit what is not yet durable, then the result. Return the last commit.
        result: for the file RESULT; results: numbers for the manifest. Errors: Fenced, StoreFull.
        """
        self.commit()
        records, blobs = {CLOCK: result.clock_bytes()}, {RESULT: result.to_bytes()}
        return self._commit(done=done, records=records, blobs=blobs, results=results)

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on this evaluation, over all its processes."""
        return self.wall_s + time.perf_counter() - self._began

    def _commit(
        self,
        *,
        done: bool,
        records: Mapping[str, bytes],
        blobs: Mapping[str, bytes] | None = None,
        results: dict[str, Any] | None = None,
    ) -> Manifest:
        with self._one_at_a_time:  # an interrupted commit may still be writing
            manifest = self.make_commit(
                done=done,
                state={"num_slots": len(self.slots), "num_counted": self.num_counted},
                records=records,
                blobs=blobs or {},
                results=results or {},
                wall_s=self.elapsed_s,
            )
        self._committed_at = time.monotonic()
        return manifest


@dataclass(frozen=True)
class Plan:
    """The slots, settings and identity of an evaluation, written before its first episode."""

    slots: tuple[Slot, ...]
    about: Mapping[str, Any]
    identity: Mapping[str, Any]

    @property
    def protocol(self) -> EvaluationProtocol:
        return EvaluationProtocol.model_validate(self.about["settings"])

    def to_bytes(self) -> bytes:
        rows = [[slot.env, slot.item_id, slot.sample, slot.task] for slot in self.slots]
        tree = {"about": self.about, "identity": self.identity, "slots": rows}
        return json.dumps(tree, separators=(",", ":")).encode()


def read_plan(store: RunStore, first: Manifest) -> Plan:
    """Read the plan of an evaluation from its first commit. Errors: BlobMissing, DigestMismatch."""
    tree = json.loads(store.read(first, PLAN))
    slots = tuple(Slot(*row) for row in tree["slots"])
    # config is the identity of an evaluation on its own, but the run's settings in a step of a run
    identity = first.config if first.step == STEP else tree["identity"]
    return Plan(slots, tree["about"], identity)


def replay(store: RunStore, commits: Sequence[Manifest], slots: dict[Key, Slot]) -> None:
    """Update `slots` in place with the attempts of the commits, oldest first.
    Errors: KeyError for an unknown slot; as `attempts_of`.
    """
    for trajectory in attempts_of(store, commits):
        key = slot_of(trajectory)
        slots[key] = slots[key].played(trajectory)


def attempts_of(store: RunStore, commits: Sequence[Manifest]) -> Iterator[Trajectory]:
    """Yield every recorded attempt, also failed ones, with one file in memory at a time.
    Errors: BlobMissing, DigestMismatch, RecordError.
    """
    for commit in commits:
        for name in (ATTEMPTS, TRAJECTORIES):
            if name in commit.records:
                yield from decode_trajectories(store.read(commit, name))


def examples_of(store: RunStore, commits: Sequence[Manifest]) -> Iterator[Trajectory]:
    """Yield each environment's first success and first failure among the episodes that count."""
    yielded = set()
    for trajectory in attempts_of(store, commits):
        kind = (trajectory.item.env, trajectory.success)
        if trajectory.status.is_valid and kind not in yielded:
            yielded.add(kind)
            yield trajectory


def find(store: RunStore, digest: str) -> Manifest:
    """Return the newest commit of the evaluation whose key begins with `digest`.
    digest: empty for the only one. Errors: ConfigError if there is none or more than one.
    """
    heads = [head for head in store.heads() if head.step == STEP or RESULT in head.blobs]
    matching = [head for head in heads if head.key.startswith(digest)] if digest else heads
    if len(matching) != 1:
        known = ", ".join(head.key[:12] for head in matching or heads) or "none"
        problem = "is the beginning of several" if matching else "is none"
        raise ConfigError(f"evaluation {digest or '(none named)'} {problem}; there are: {known}")
    return matching[0]


EPISODES = "episodes.parquet"  # every attempt of an evaluation, for further analysis
ROWS = 2_000  # rows per row group, so at most this many are in memory


def write_episodes(path: Path, attempts: Iterable[Trajectory]) -> int:
    """Write a parquet file with one row per attempt, also failed ones. Return the row count."""
    import pyarrow
    import pyarrow.parquet

    kinds = _schema(pyarrow)
    rows, count = iter(map(to_row, attempts)), 0
    with pyarrow.parquet.ParquetWriter(path, kinds, compression="zstd") as writer:
        while group := list(islice(rows, ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=kinds))
            count += len(group)
    return count


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file from `write_episodes`, with ROWS of them in memory at a time."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_pylist()


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the attempt as a row of EPISODES. A turn's info is JSON text: its keys differ."""
    outcome, usage = OUTCOME_OF[trajectory.status], usage_of(trajectory)
    return {
        "env": trajectory.item.env,
        "item_id": trajectory.item.item_id,
        "split": trajectory.item.split,
        "sample": trajectory.sample,
        "attempt": trajectory.num_attempts,
        "outcome": str(outcome),
        "status": str(trajectory.status),
        "counts": outcome.counts,
        "success": trajectory.success,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "num_turns": len(trajectory.turns),
        "temperature": trajectory.temperature,
        "max_turns": trajectory.max_turns,
        "first_observation": trajectory.first_observation,
        "turns": [
            {
                "action": turn.action,
                "observation": turn.observation,
                "reward": float(turn.reward),
                "reply": turn.reply or turn.action,
                "info": json.dumps(dict(turn.info)),
                "generate_s": turn.generate_s,
                "env_s": turn.env_s,
            }
            for turn in trajectory.turns
        ],
        "usage": flat(usage),
        "wall_s": float(trajectory.timing.get("wall_s", 0.0)),
        "began_s": float(trajectory.timing.get("began_s", 0.0)),
    }


def _schema(pyarrow: Any) -> Any:
    text, whole = pyarrow.string(), pyarrow.int64()
    real, flag = pyarrow.float64(), pyarrow.bool_()
    turn = {
        **dict.fromkeys(("action", "observation"), text),
        "reward": real,
        **dict.fromkeys(("reply", "info"), text),
        **dict.fromkeys(("generate_s", "env_s"), real),
    }
    return pyarrow.schema(
        {
            **dict.fromkeys(("env", "item_id", "split"), text),
            **dict.fromkeys(("sample", "attempt"), whole),
            **dict.fromkeys(("outcome", "status"), text),
            **dict.fromkeys(("counts", "success"), flag),
            "reward": real,
            "error": text,
            "num_turns": whole,
            "temperature": real,
            "max_turns": whole,
            "first_observation": text,
            "turns": pyarrow.list_(pyarrow.struct(turn)),
            "usage": pyarrow.struct(dict.fromkeys(Usage.__slots__, whole)),
            **dict.fromkeys(("wall_s", "began_s"), real),
        }
    )
