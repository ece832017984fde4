"""The learner in several processes: an actor per rank, and a facade with the learner's methods."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from agentgym.algorithms.batch import Experience
from agentgym.compute.transfer import (
    SLACK_S,
    BroadcastSender,
    InObjectStore,
    Outbox,
    Sender,
    cause_of,
    end,
    first_line,
    node_address,
    put,
)
from agentgym.learner.learner import LocalLearner
from agentgym.learner.start import LearnerPlan
from agentgym.models.model import set_threads
from agentgym.models.transport import Broadcast, Place, meet, serve, use_interface_of
from agentgym.store.manifest import Blob
from agentgym.store.runstore import StorePlace
from agentgym.types import EngineMismatch

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

VERDICT_S = 10.0  # after one rank failed, for the others to report
MIN_BYTES_PER_S = 1 << 20  # lowest assumed speed of a store


class RankLost(RuntimeError):
    """A process that holds a part of the weights died, hangs, or failed unexpectedly."""


class LearnerRank:
    """Actor with one rank's part of the weights, which it trains, writes to a store and sends."""

    def __init__(self, rank: int, size: int, device: str, timeout_s: float) -> None:
        set_threads()
        self._rank, self._size, self._timeout = rank, size, datetime.timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._meeting: Any = None
        self._learner: Any = None
        self._snapshot: Any = None
        self._writing: Future[dict[str, Blob]]
        self._writer = ThreadPoolExecutor(1, "write")

    def where(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def serve(self) -> tuple[str, int]:
        """Open the ranks' rendezvous at this node's address alone. Result: (host, port)."""
        self._meeting, rendezvous = serve(node_address(), self._size, self._timeout)
        return rendezvous

    def join(self, rendezvous: Place, plan: LearnerPlan) -> None:
        """Meet the other ranks and build this rank's part of the learner. rendezvous: (host, port),
        or path of a file.
        """
        from agentgym.learner.sharded import Sharded

        store = self._meeting or meet(rendezvous, self._size, self._timeout)
        use_interface_of(node_address())  # ranks exchange data over the interface that Ray uses
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._size, timeout=self._timeout
        )
        self._learner = plan.build(Sharded(self._device))
        folder = rendezvous.parent if isinstance(rendezvous, Path) else None
        self._outbox = Outbox(self._device, folder)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call the learner's method, as all ranks must. Return its result on rank 0, else None."""
        result = getattr(self._learner, method)(*arguments, **named)
        return _on_host(result) if self._rank == 0 else None

    def snapshot(self, with_optimizer: bool) -> int:
        """Copy this rank's part for `begin_writing`, as all ranks must. Result: size in bytes."""
        self._snapshot = self._learner.snapshot(with_optimizer)
        return int(self._snapshot.size)

    def begin_writing(self, store_place: StorePlace, step: str, key: str) -> None:
        taken, self._snapshot = self._snapshot, None
        self._writing = self._writer.submit(taken.write, store_place, step, key)

    def written(self) -> dict[str, Blob] | None:
        """Return the blobs by name; None while they are written. Errors: those of the write."""
        return self._writing.result() if self._writing.done() else None

    def export(self, version: int) -> InObjectStore | None:
        """Put the whole weights into the object store. Return the delivery on rank 0, else None."""
        weights = self._learner.weights_on_host()
        return None if self._rank else put(weights, version)

    def keep(self, version: int, timeout_s: float) -> Broadcast | None:
        """Keep the whole weights on rank 0, to broadcast them.
        Result: on rank 0 the broadcast without its address, else None.
        """
        weights = self._learner.weights_on_host()
        return None if self._rank else self._outbox.keep(weights, version, timeout_s)

    def open_broadcast(self, template: Broadcast, size: int) -> Broadcast:
        return self._outbox.open(template, size)

    def send(self, broadcast: Broadcast) -> None:
        self._outbox.send(broadcast)


def _on_host(result: Any) -> Any:
    """Return the result, every Experience in host memory: the receiver may have no GPU."""
    if isinstance(result, tuple):
        return tuple(map(_on_host, result))
    return result.to(torch.device("cpu")) if isinstance(result, Experience) else result


class RanksSnapshot:
    """Snapshot of a learner; every rank keeps the copy of its part."""

    def __init__(self, actors: Sequence[Any], sizes: Sequence[int], timeout_s: float) -> None:
        """Describe the ranks' copies. sizes: bytes of each; timeout_s: limit of one call."""
        self._actors, self._sizes, self._timeout_s = actors, sizes, timeout_s
        self._closed = False
        self.is_over = threading.Event()  # set unless `write` is running
        self.is_over.set()

    @property
    def size(self) -> int:
        """Size of all parts together, bytes."""
        return sum(self._sizes)

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Let every rank write its part, once, while training continues; return all blobs by name.
        Errors: StoreFull, StoreNotHere; RankLost after a deadline or `close`, or if a rank died.
        """
        self.is_over.clear()
        try:
            self._ask("begin_writing", place, step, key)
            deadline = time.monotonic() + self._timeout_s + max(self._sizes) / MIN_BYTES_PER_S
            pause_s = 0.01
            while time.monotonic() < deadline and not self._closed:
                answers = self._ask("written")
                if None not in answers:
                    return {name: blob for answer in answers for name, blob in answer.items()}
                time.sleep(pause_s)
                pause_s = min(1.0, 2 * pause_s)
            raise RankLost(
                f"the learner's ranks have not written {self.size} bytes to {place.root} in time;"
                " run the step again to go on from its last commit"
            )
        finally:
            self.is_over.set()

    def close(self) -> None:
        """Wait for a running `write`, at most for the limit of one call; if it still runs, let it
        fail with RankLost. Call this before the ranks end.
        """
        if not self.is_over.wait(self._timeout_s):
            self._closed = True

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank and return the answers. Errors: a rank's own; RankLost."""
        import ray

        try:
            references = [getattr(actor, method).remote(*arguments) for actor in self._actors]
            return list(ray.get(references, timeout=self._timeout_s + SLACK_S))
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except ray.exceptions.RayError as error:
            raise RankLost(f"a rank of the learner was lost: {first_line(error)}") from None


def _on_every_rank(
    method: Callable[Concatenate[LocalLearner, P], T],
) -> Callable[Concatenate[RayLearner, P], T]:
    """Return a method that calls the learner's on every rank and returns rank 0's result."""

    def call(learner: RayLearner, /, *arguments: P.args, **named: P.kwargs) -> T:
        import ray

        shared = [ray.put(argument) for argument in arguments]
        calls = [actor.call.remote(method.__name__, *shared, **named) for actor in learner.actors]
        return cast(T, learner.gather(calls)[0])

    return call


class RayLearner:
    """A `Learner` spread over ranks. Every call is one call of all ranks; an error ends all ranks.
    Errors of every call: RankLost; a rank's EngineMismatch, FloatingPointError or ValueError.
    """

    def __init__(self, actors: Sequence[Any], *, start_timeout_s: float, timeout_s: float) -> None:
        """Keep the ranks for `join`. Limits: start_timeout_s until all run; timeout_s of a call."""
        self.actors, self._start_timeout_s, self._timeout_s = actors, start_timeout_s, timeout_s
        self._where = ["not started yet"] * len(actors)
        self._snapshot: RanksSnapshot | None = None  # the last one

    def join(self, plan: LearnerPlan, folder: Path | None) -> None:
        """Let the ranks meet and build the learner.

        folder: one that all ranks see and no other user can open: they meet in a file in it.
        None: they meet at a port of rank 0's node, which requires no secret.
        Errors: RankLost; a rank's own.
        """
        import ray

        where = [actor.where.remote() for actor in self.actors]
        self._where = self.gather(where, self._start_timeout_s)
        rendezvous = (
            self.gather([self.actors[0].serve.remote()])[0]
            if folder is None
            else folder / f"ranks-{secrets.token_hex(8)}"
        )
        shared = ray.put(plan)
        joined = [actor.join.remote(rendezvous, shared) for actor in self.actors]
        self.gather(joined, self._timeout_s + plan.size / MIN_BYTES_PER_S)
        ranks = [f"rank {rank} is {where}" for rank, where in enumerate(self._where)]
        logger.info("learner: %s", "; ".join(ranks))

    peak_tflops = _on_every_rank(LocalLearner.peak_tflops)
    score = _on_every_rank(LocalLearner.score)
    score_reference = _on_every_rank(LocalLearner.score_reference)
    drop_reference = _on_every_rank(LocalLearner.drop_reference)
    prepare = _on_every_rank(LocalLearner.prepare)
    update = _on_every_rank(LocalLearner.update)
    sft_step = _on_every_rank(LocalLearner.sft_step)
    dpo_step = _on_every_rank(LocalLearner.dpo_step)

    def snapshot(self, with_optimizer: bool = True) -> RanksSnapshot:
        sizes = self.gather([actor.snapshot.remote(with_optimizer) for actor in self.actors])
        self._snapshot = RanksSnapshot(self.actors, sizes, self._timeout_s)
        return self._snapshot

    def close(self) -> None:
        """Wait until the last snapshot, if any, is written; see `RanksSnapshot.close`."""
        if self._snapshot is not None:
            self._snapshot.close()

    def export(self, version: int, transport: str, timeout_s: float) -> Sender:
        """Return a sender of the whole weights as they are now, as `version`.
        transport: "object_store", or any other for broadcasts; timeout_s: limit of a broadcast.
        """
        if transport == "object_store":
            exported = self.gather([actor.export.remote(version) for actor in self.actors])
            return cast(InObjectStore, exported[0])
        kept = self.gather([actor.keep.remote(version, timeout_s) for actor in self.actors])[0]
        return BroadcastSender(self.actors[0], kept)

    def gather(self, references: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Return each rank's answer, in order. End all ranks after a failure or the deadline: the
        others may wait in an exchange that the failed one never enters.
        timeout_s: None: the limit of one call.
        Errors: a rank's EngineMismatch, FloatingPointError or ValueError; else RankLost with the
        names of the ranks that died, hang or failed.
        """
        import ray

        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = list(references)
        deadline = time.monotonic() + (timeout_s or self._timeout_s) + SLACK_S
        while waiting:
            ready, waiting = ray.wait(
                waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            rank = references.index(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                failures[rank] = error
                deadline = min(deadline, time.monotonic() + VERDICT_S)
        if not failures and not waiting:
            return [results[rank] for rank in range(len(references))]
        end(self.actors)
        causes = {rank: cause_of(error) for rank, error in failures.items()}
        for cause in causes.values():
            if isinstance(cause, EngineMismatch | FloatingPointError | ValueError):
                raise cause
        silent = [references.index(reference) for reference in waiting]
        raise RankLost(self._verdict(causes, silent))

    def _verdict(self, causes: dict[int, BaseException], silent: list[int]) -> str:
        """Return the error text, the likely culprit first: ranks that died, then silent ranks, then
        ranks that raised an error (`causes`), often because another is gone.
        """
        import ray

        died, failed = [], []
        for rank, cause in causes.items():
            name, reason = f"rank {rank} ({self._where[rank]})", first_line(cause)
            if isinstance(cause, ray.exceptions.RayError):
                died.append(f"{name} died: {reason}")
            else:
                failed.append(f"{name} failed: {type(cause).__name__}: {reason}")
        answerless = [f"rank {rank} ({self._where[rank]}) does not answer" for rank in silent]
        lines = "; ".join([*died, *answerless, *failed])
        return f"learner {lines}; run the step again to go on from its last commit"
