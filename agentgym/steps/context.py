"""The context of a running step: parameters, parents, and the way to make progress durable."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from agentgym.config import RunConfig
from agentgym.models.architecture import files_of
from agentgym.records import TRAJECTORIES, encode_trajectories
from agentgym.steps.step import Kind, Step
from agentgym.store.manifest import Blob, Manifest, PassedStep, StepWriter
from agentgym.store.runstore import RunStore, StorePlace, Writable
from agentgym.tracking.deliver import committed_points
from agentgym.tracking.points import Point, SystemMetrics, Watch, decode_points, encode_points
from agentgym.types import Endpoints, Trajectory

if TYPE_CHECKING:
    from agentgym.models.adapter import Adapter
    from agentgym.models.tensorfiles import StoredTensors

logger = logging.getLogger(__name__)

# offer_expert -> context in which servers run, with their endpoints
Environment = Callable[[bool], AbstractContextManager[Endpoints]]
Blobs = Mapping[str, bytes | Blob]

METRICS = "metrics.jsonl"
VALIDATION = "validation/success"


class Progress(Protocol):
    """Display of a step's progress: a progress bar, an artifact, or nothing."""

    def start(self, what: str, total: int) -> None:
        """Begin a part of `total` units and end the previous part."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


class NoProgress:
    """A `Progress` that shows nothing."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self, count: int = 1, note: str = "") -> None: ...


def not_here(policy: str) -> Any:
    """Raise RuntimeError: the default if a context can neither evaluate nor audit."""
    raise RuntimeError(f"{policy} cannot be evaluated here")


@dataclass(kw_only=True)
class StepReader:
    """The inputs of a step: its parameters and its parents' results."""

    cfg: RunConfig
    step: Step
    store: RunStore
    parents: dict[str, Manifest]

    @property
    def data(self) -> Manifest:
        """The commit that has the items."""
        return self.parents[self.step.data]

    @property
    def checkpoint(self) -> Manifest:
        """The commit whose weights this step trains further, plays or registers."""
        return self.parents[self.step.checkpoint]

    @property
    def start(self) -> Manifest:
        """The commit whose weights a KL penalty or self-training refers to."""
        return self.parents[self.step.start]

    @property
    def demonstrations(self) -> Manifest:
        return self.parents[self.step.demonstrations]

    def read(self, manifest: Manifest, name: str) -> bytes:
        """Return verified content of a commit. Errors: KeyError, DigestMismatch, BlobMissing."""
        return self.store.read(manifest, name)

    def tensors(self, manifest: Manifest, name: str) -> StoredTensors:
        """Return a commit's tensors of this name, not yet read. Errors: KeyError."""
        from agentgym.models.tensorfiles import StoredTensors  # imports torch, which is slow

        return StoredTensors.of(self.store, manifest, name)

    def tensors_of(self, manifest: Manifest, *names: str) -> dict[str, StoredTensors]:
        """Return name -> tensors, for those of these names that the commit has."""
        return {name: self.tensors(manifest, name) for name in names if files_of(manifest, name)}

    def policy(self, manifest: Manifest) -> StoredTensors:
        """Return a commit's policy weights, its adapter merged. Errors: KeyError, ValueError."""
        from agentgym.models.checkpoint import policy_of

        return policy_of(self.store, manifest)

    def adapter(self, manifest: Manifest) -> Adapter | None:
        """Return a commit's adapter, else a new one; None if lora.rank is 0.
        Errors: ConfigError, ValueError.
        """
        from agentgym.models.checkpoint import adapter_for

        cfg = self.cfg
        return adapter_for(self.store, manifest, cfg.lora, cfg.seed) if cfg.lora.rank else None


@dataclass(kw_only=True)
class StepContext(StepReader):
    """An open step with its writer, the only one that may commit to it."""

    config: dict[str, Any]  # the semantic fields in the step's key
    writer: StepWriter
    environment: Environment
    progress: Progress = field(default_factory=NoProgress)
    on_commit: Callable[[Manifest], None] = lambda _: None
    # what the promotion gate may call while a model is registered: name of a policy for `agentgym
    # evaluate` -> its Result by the gate's protocol; key of a run -> audit fields of its evidence
    play_anew: Callable[[str], Any] = not_here
    audited: Callable[[str], Any] = not_here
    trained: Sequence[Manifest] = ()  # the stages before this one, in order
    _opened_at: float = field(default_factory=time.perf_counter)
    _wall_s: float = field(init=False)  # of this step, over all attempts
    _held: list[PassedStep] = field(default_factory=list)  # steps since the last commit
    _durable_step: int | None = None  # the last one that is committed or being written
    _committed_at: float = -math.inf  # on the monotonic clock
    _commit_bytes: int = 0  # of the last commit
    _swept: bool = False
    _writing: Future[Manifest] | None = None
    _thread: ThreadPoolExecutor = field(init=False)
    _system: SystemMetrics | None = None

    def __post_init__(self) -> None:
        head = self.writer.head
        self._wall_s = head.timings.get("wall_s", 0.0) if head else 0.0
        self._thread = ThreadPoolExecutor(1, "commit")
        # an evaluation's system metrics would lie on the same axis as those of training
        if self.step.kind is Kind.TRAIN:
            self._system = SystemMetrics(self.cfg.state_dir)

    @property
    def head(self) -> Manifest | None:
        """The last commit of this step, from which a resumed run continues."""
        return self.writer.head

    def commit(
        self,
        *,
        done: bool,
        state: dict[str, Any],
        blobs: Blobs,
        snapshot: Writable | None = None,
        results: dict[str, Any] | None = None,
        points: Sequence[Point] = (),
        trajectories: Sequence[Trajectory] = (),
        records: Mapping[str, bytes] | None = None,
    ) -> Manifest:
        """Write a commit: weights first, manifest last, then MLflow. Then old weights are pruned.

        A kill between any two of these loses nothing and repeats nothing.
        A commit that is being written in the background is awaited first; its errors are raised.
        blobs, snapshot: content that is equal to the bit in every run of the same step. records:
        content with times. Errors: those of `StepWriter.commit`; AlarmStop, after the commit.
        """
        self._finish_writing()
        logs = {**_logs(self._watched(points), trajectories), **(records or {})}
        manifest = self._write(done, self._passed(state, logs, results), blobs, snapshot, ())
        if stop := self.watch.stop:
            raise stop
        return manifest

    def step_taken(
        self,
        step: int,
        *,
        done: bool,
        state: dict[str, Any],
        files: Mapping[str, bytes],
        snapshot: Callable[[bool], Writable],
        results: dict[str, Any] | None = None,
        points: Sequence[Point] = (),
        trajectories: Sequence[Trajectory] = (),
    ) -> Manifest | None:
        """Record an optimizer step (from 1), and commit it if a commit is due by
        `store.commit_every` and `store.max_mib_per_minute`.

        Other steps become durable with a later commit, or are taken again after a crash.
        The commit is written in the background, one at a time. Its failure is raised by the next
        call or by `close`.
        files: small content. snapshot: copies the large content now; its argument is True to
        include the optimizer's state, which the last commit needs only if a later step continues.
        Result: the manifest if `done`, after the commit is written; else None.
        Errors: AlarmStop, once the step is durable.
        """
        if self._writing is not None and self._writing.done():
            self._finish_writing()
        if self._durable_step is None:
            self._durable_step = step - 1
        points = self._watched(points)
        stop = self.watch.stop
        passed = self._passed(state, _logs(points, trajectories), results)
        score = validation_of(points) if self.cfg.store.keep_best else None
        if not (done or stop or self._is_due(step, scored=score is not None)):
            self._held.append(passed)
            return None
        self._finish_writing()
        taken, earlier = snapshot(not done or self.step.is_continued), tuple(self._held)
        self._held.clear()
        self._durable_step, self._committed_at = step, time.monotonic()
        self._commit_bytes = sum(map(len, files.values())) + taken.size
        self._writing = self._thread.submit(self._write, done, passed, files, taken, earlier, score)
        if stop:
            self._finish_writing()
            raise stop
        return self._finish_writing() if done else None

    @cached_property
    def watch(self) -> Watch:
        """The watch over the run's alarms, with the points committed so far."""
        steps = [(stage.step, stage.key) for stage in self.trained]
        points = [
            point
            for step, key in [*steps, (self.writer.step, self.writer.key)]
            for point in committed_points(self.store, step, key)
        ]
        return Watch(self.cfg.alarms, points)

    def _watched(self, points: Sequence[Point]) -> list[Point]:
        if points and self._system:
            last = points[-1]  # system metrics are of the current time
            last = replace(last, metrics={**last.metrics, **self._system.read()})
            points = [*points[:-1], last]
        return [self.watch.take(point) for point in points]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, stopped: BaseException | None, trace: object) -> None:
        """Close. If the step raised, keep its exception; a failed commit is then only logged."""
        try:
            self.close()
        except Exception as error:
            if stopped is None:
                raise
            logger.warning("step %s: its last commit was not made: %s", self.step.name, error)

    def close(self) -> None:
        """Wait for the commit that is being written. Errors: those of the commit."""
        try:
            self._finish_writing()
        finally:
            self._thread.shutdown()

    def _is_due(self, step: int, *, scored: bool) -> bool:
        settings, before = self.cfg.store, self._durable_step
        assert before is not None
        if not scored and step // settings.commit_every == before // settings.commit_every:
            return False
        allowed = settings.max_mib_per_minute * 2**20 / 60
        passed_s = time.monotonic() - self._committed_at
        return not allowed or passed_s * allowed >= self._commit_bytes

    def _passed(
        self, state: dict[str, Any], logs: dict[str, bytes], results: dict[str, Any] | None
    ) -> PassedStep:
        now = time.perf_counter()
        self._wall_s, self._opened_at = self._wall_s + now - self._opened_at, now
        return PassedStep(state, logs, results or {}, {"wall_s": self._wall_s})

    def _write(
        self,
        done: bool,
        last: PassedStep,
        blobs: Blobs,
        snapshot: Writable | None,
        earlier: Sequence[PassedStep],
        score: float | None = None,
    ) -> Manifest:
        if snapshot is not None:
            blobs = {**blobs, **self._written(snapshot)}
        manifest = self.writer.commit(
            done=done,
            state=last.state,
            parents={name: parent.digest for name, parent in self.parents.items()},
            config=self.config,
            blobs=blobs,
            records=last.records,
            results=last.results,
            timings=last.timings,
            earlier=earlier,
        )
        if score is not None and score > self._best[0]:
            self._best = score, manifest.seq
        self.on_commit(manifest)
        self.writer.prune(1 if done else self.cfg.store.keep_checkpoints, also=self._best[1])
        return manifest

    def _written(self, snapshot: Writable) -> dict[str, Blob]:
        self.writer.check()  # before writing gigabytes for nothing
        if not self._swept:  # files of a killed writer may take the space that is needed
            self.writer.prune(self.cfg.store.keep_checkpoints, also=self._best[1])
            self._swept = True
        try:
            return snapshot.write(StorePlace.of(self.store), self.writer.step, self.writer.key)
        except FileNotFoundError:  # a newer holder of the lease may have removed it
            self.writer.check()
            raise

    @cached_property
    def _best(self) -> tuple[float, int | None]:
        """(validation success, seq) of the best commit; (-inf, None) without one or keep_best."""
        if not self.cfg.store.keep_best:
            return -math.inf, None
        return max(
            scores(self.store, self.writer.step, self.writer.key),
            key=lambda entry: entry[0],
            default=(-math.inf, None),
        )

    def _finish_writing(self) -> Manifest | None:
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()


def scores(store: RunStore, step: str, key: str) -> list[tuple[float, int]]:
    """Return (validation success, seq) of each validated commit with content, in order."""
    scored = []
    for manifest in store.history(step, key):
        if manifest.blobs and METRICS in manifest.records:
            score = validation_of(decode_points(store.read(manifest, METRICS)))
            if score is not None:
                scored.append((score, manifest.seq))
    return scored


def validation_of(points: Sequence[Point]) -> float | None:
    """Return the validation success of the last point; None if it has none."""
    return points[-1].metrics.get(VALIDATION) if points else None


def _logs(points: Sequence[Point], trajectories: Sequence[Trajectory]) -> dict[str, bytes]:
    return {
        **({METRICS: encode_points(points)} if points else {}),
        **({TRAJECTORIES: encode_trajectories(trajectories)} if trajectories else {}),
    }


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow stamps its points."""
    return time.time_ns() // 1_000_000
