"""A run spread over processes of a Ray cluster: ranks that hold the weights, workers that play episodes.

The facades here have the methods of `Learner` and `Engine`. A worker that is lost costs the episodes it had not finished:
they are played again elsewhere, and another worker takes its place. A rank that is lost ends the step, which goes on
from its last commit when it is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from torch import Tensor

from agentgym.algorithms.batch import Batch
from agentgym.config import AlgorithmConfig, ConfigError, RunConfig
from agentgym.deploy.rayjobs import RayUnreachable, auth_headers
from agentgym.rollouts.chat import ChatRenderer
from agentgym.rollouts.client import EnvPool, check_endpoints
from agentgym.rollouts.collect import collect, in_order, require_valid
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.store.lease import pid_space, process_start
from agentgym.training.checkpoint import ARCHITECTURE, TOKENIZER, WEIGHTS, Checkpoint
from agentgym.training.compute import LearnerPlan
from agentgym.training.engine import Canary, LoopThread, episode_settings
from agentgym.training.learner import EngineMismatch
from agentgym.training.model import model_from_blobs, set_threads, tokenizer_from_files
from agentgym.types import Item, Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0  # to the cluster's port
VERDICT_S = 10.0  # after one rank failed, for the others to say what they know
SLACK_S = 30.0  # on top of a remote call's own deadline
TEMP_PREFIX = "agentgym-ray-"  # folder of a local cluster: prefix, process, its start, its pid space
TEMP_ROOT = Path("/tmp")  # noqa: S108 - a socket's path has 107 bytes, so neither the state folder nor TMPDIR will do
_in_use = threading.Lock()  # Ray knows one cluster per process
_token = secrets.token_hex(32)  # of this process's local clusters


class PlacementError(RuntimeError):
    """The cluster has no room for what the run asks for."""


class RankLost(RuntimeError):
    """A process that holds a part of the weights died, hangs, or failed alone."""


class WorkersLost(RuntimeError):
    """More rollout workers died than may be replaced."""


@contextmanager
def open_cluster(cfg: RunConfig, *, num_ranks: int, num_workers: int) -> Iterator[Cluster]:
    """Room for so many ranks and workers on the configured cluster, or on a local one that ends with the block.

    Errors: RayUnreachable; PlacementError after `ray.placement_timeout_s`; ConfigError where Ray is not installed.
    """
    settings = cfg.ray
    rank = _bundle(settings.rank_cpus, settings.rank_gpus)
    worker = _bundle(settings.worker_cpus, settings.worker_gpus)
    bundles = [rank] * num_ranks + [worker] * num_workers
    with connected(settings.address, num_cpus=sum(bundle.get("CPU", 0.0) for bundle in bundles)), _placed(cfg, bundles) as group:
        yield Cluster(cfg, group, num_ranks, num_workers)


class Cluster:
    """A placement group, and what runs in it: first the ranks, then the workers."""

    def __init__(self, cfg: RunConfig, group: Any, num_ranks: int, num_workers: int) -> None:
        self._cfg, self._group, self._num_ranks, self._num_workers = cfg, group, num_ranks, num_workers

    @contextmanager
    def learner(self, plan: LearnerPlan) -> Iterator[RayLearner]:
        """The plan's learner, spread over the ranks. Errors: RankLost."""
        settings = self._cfg.ray
        actors = [
            self._actor(index, LearnerRank, settings.rank_cpus, settings.rank_gpus).remote(
                index, self._num_ranks, settings.rank_gpus > 0, settings.rank_timeout_s
            )
            for index in range(self._num_ranks)
        ]
        try:
            learner = RayLearner(actors, settings.rank_timeout_s)
            learner.join(plan)
            yield learner
        finally:
            _end(actors)

    @contextmanager
    def engine(self, checkpoint: Checkpoint, endpoints: Sequence[str], *, version: int) -> Iterator[RayEngine]:
        """Workers that hold the checkpoint's weights as `version`. Errors: as their environment client's; WorkersLost."""
        settings = self._cfg.ray
        num_slots = -(-self._cfg.rollout.concurrency // self._num_workers)

        def spawn(index: int) -> Any:
            bundle = self._num_ranks + index
            maker = self._actor(bundle, RolloutWorker, settings.worker_cpus, settings.worker_gpus, max_concurrency=num_slots + 8)
            return maker.remote(self._cfg, checkpoint.files(), tuple(endpoints), num_slots, _node())

        loop = LoopThread()
        engine = RayEngine(self._cfg, checkpoint, spawn, self._num_workers, loop)
        try:
            engine.start(version)
            yield engine
        finally:
            loop.close()
            _end([worker.actor for worker in engine.workers])

    def _actor(self, bundle: int, kind: type, cpus: float, gpus: float, **options: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(kind).options(
            num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place, max_restarts=0, max_task_retries=0, **options
        )


@contextmanager
def connected(address: str, *, num_cpus: float) -> Iterator[None]:
    """This process as a driver of the cluster at `address`, or of a local one of so many logical CPUs where it is empty.

    A local cluster ends with the block, and with this process if that is killed: its servers die with the thread that
    started them, its workers with those, and its folder is removed by the next local cluster.
    Errors: RayUnreachable; ConfigError where Ray is not installed.
    """
    if not _in_use.acquire(blocking=False):
        raise RuntimeError("another step of this process runs on Ray, which knows one cluster per process; run them one after the other")
    try:
        ray = _import_ray()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        with _environment_kept("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), contextlib.ExitStack() as stack:
            options = {"log_to_driver": True, "logging_level": logging.ERROR, "configure_logging": True}
            try:
                if address:
                    _join(ray, address, options)
                else:
                    folder = stack.enter_context(_temp_folder())
                    os.environ.setdefault("RAY_AUTH_TOKEN", _token)  # or Ray would write one into the home directory
                    ray.init(num_cpus=max(1, round(num_cpus + 0.5)), include_dashboard=False, _temp_dir=str(folder), **options)
                if in_main_thread:
                    signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process without a word
                yield
            finally:
                ray.shutdown()
    finally:
        _in_use.release()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"compute ray needs Ray ({error}); install it with: pip install 'agentgym-flow[cluster]'") from None
    return ray


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Errors: RayUnreachable, also where a token is missing or wrong."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    advice = "start the cluster, or correct ray.address (host:port of its GCS; this machine must be one of its nodes)"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not (host and port.isdigit()):
            raise ConfigError(f"ray.address {address!r} must be host:port of a cluster's GCS, auto, or empty for a local cluster")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:  # Ray itself would try for minutes, and then end this process
            raise RayUnreachable(f"no Ray cluster answers at {address} ({error}); {advice}") from None
    if auth_headers(os.environ):  # clusters ask for a token by default, Ray's clients send one only if told to
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RayUnreachable(f"the Ray cluster at {address} cannot be joined: {reason}; {advice}") from None


@contextmanager
def _environment_kept(*names: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _temp_folder() -> Iterator[Path]:
    """A short path for a local cluster. Those whose process was killed are removed on the way."""
    space = hashlib.sha256(pid_space().encode()).hexdigest()[:6]
    for folder in TEMP_ROOT.glob(f"{TEMP_PREFIX}*-{space}"):
        pid, started = folder.name.removeprefix(TEMP_PREFIX).split("-")[:2]
        if process_start(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)
    own = TEMP_ROOT / f"{TEMP_PREFIX}{os.getpid()}-{process_start(os.getpid())}-{space}"
    own.mkdir(mode=0o700, exist_ok=True)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


@contextmanager
def _placed(cfg: RunConfig, bundles: list[dict[str, float]]) -> Iterator[Any]:
    """A placement group of these bundles, ready. Errors: PlacementError."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(cfg.ray.placement_timeout_s):
            raise PlacementError(_no_room(cfg, bundles))
        yield group
    finally:
        remove_placement_group(group)


def _no_room(cfg: RunConfig, bundles: list[dict[str, float]]) -> str:
    import ray
    from ray._private.state import available_resources_per_node

    def spell(resources: dict[str, float]) -> str:
        return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in ("CPU", "GPU") if name in resources) or "nothing"

    free = available_resources_per_node()
    nodes = [
        f"node {node['NodeManagerAddress']} has {spell(node['Resources'])}, of which free {spell(free.get(node['NodeID'], {}))}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    asked = [f"{bundles.count(bundle)} x ({spell(bundle)})" for bundle in {str(bundle): bundle for bundle in bundles}.values()]
    return (
        f"the Ray cluster has no room for this run within ray.placement_timeout_s {cfg.ray.placement_timeout_s:g}: asked for "
        f"{' and '.join(asked)}; {'; '.join(nodes) or 'no node is alive'}. Lower ray.num_workers, ray.num_ranks or what each takes, "
        "or add nodes"
    )


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _end(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):  # it is gone already, or goes with the cluster
            ray.kill(actor, no_restart=True)


class LearnerRank:
    """Actor: one process of those that hold the weights."""

    def __init__(self, rank: int, size: int, on_gpu: bool, timeout_s: float) -> None:
        set_threads()
        self._rank, self._size, self._timeout = rank, size, datetime.timedelta(seconds=timeout_s)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._meeting: Any = None
        self._learner: Any = None

    def where(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def serve(self) -> tuple[str, int]:
        """On rank 0: open the place where the ranks meet. Result: its address."""
        import ray

        host = ray.util.get_node_ip_address()
        self._meeting = dist.TCPStore(host, 0, self._size, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return host, self._meeting.port

    def join(self, address: tuple[str, int], plan: LearnerPlan) -> None:
        """Meet the others, and build this rank's part of the learner."""
        from agentgym.training.sharded import Sharded

        store = self._meeting or dist.TCPStore(*address, self._size, is_master=False, timeout=self._timeout)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size, timeout=self._timeout)
        self._learner = plan.build(Sharded(self._device))

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of the learner, entered by every rank; rank 0 has the result."""
        result = getattr(self._learner, method)(*arguments, **named)
        return result if self._rank == 0 else None

    def export(self) -> tuple[str, list[Any]] | None:
        """On rank 0: (sha256, [reference]) of the whole weights in the object store."""
        import ray

        blob = self._learner.weights_blob()
        return (hashlib.sha256(blob).hexdigest(), [ray.put(np.frombuffer(blob, np.uint8))]) if self._rank == 0 else None


class RayLearner:
    """A `Learner` whose weights are spread over ranks. Every call is one call of all of them."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors, self._timeout_s = actors, timeout_s
        self._where = ["not started yet"] * len(actors)

    def join(self, plan: LearnerPlan) -> None:
        import ray

        self._where = self._gather([actor.where.remote() for actor in self._actors])
        address = self._gather([self._actors[0].serve.remote()])[0]
        shared = ray.put(plan)
        self._gather([actor.join.remote(address, shared) for actor in self._actors])
        logger.info("learner: %s", "; ".join(f"rank {rank} is {where}" for rank, where in enumerate(self._where)))

    def score(self, batch: Batch) -> Tensor:
        result: Tensor = self._call("score", batch)
        return result

    def update(self, batch: Batch, config: AlgorithmConfig, *, step: int, seed: int) -> dict[str, float]:
        result: dict[str, float] = self._call("update", batch, config, step=step, seed=seed)
        return result

    def supervised(self, batch: Batch, *, step: int) -> dict[str, float]:
        result: dict[str, float] = self._call("supervised", batch, step=step)
        return result

    def prefer(self, batch: Batch, reference: Tensor, *, beta: float, label_smoothing: float, step: int) -> dict[str, float]:
        result: dict[str, float] = self._call("prefer", batch, reference, beta=beta, label_smoothing=label_smoothing, step=step)
        return result

    def blobs(self) -> dict[str, bytes]:
        result: dict[str, bytes] = self._call("blobs")
        return result

    def export(self) -> tuple[str, Any]:
        """(sha256, reference) of the whole weights in the object store."""
        digest, references = self._gather([actor.export.remote() for actor in self._actors])[0]
        return digest, references[0]

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        import ray

        shared = [ray.put(each) for each in arguments]
        return self._gather([actor.call.remote(method, *shared, **named) for actor in self._actors])[0]

    def _gather(self, references: list[Any]) -> list[Any]:
        """What each rank answered. One that fails alone leaves the others in an exchange it never enters: then all end.

        Errors: the ranks' own where it is one of ours; RankLost naming who died, hangs or failed.
        """
        import ray

        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting, deadline = list(references), time.monotonic() + self._timeout_s + SLACK_S
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
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
        _end(self._actors)
        causes = {rank: _cause(error) for rank, error in failures.items()}
        for cause in causes.values():
            if isinstance(cause, EngineMismatch | FloatingPointError | ValueError):
                raise cause
        raise RankLost(self._verdict(causes, [references.index(each) for each in waiting]))

    def _verdict(self, causes: dict[int, BaseException], silent: list[int]) -> str:
        """The culprit first: who died, then who is silent, then who complains about the others."""
        import ray

        died = [rank for rank, cause in causes.items() if isinstance(cause, ray.exceptions.RayError)]
        lines = [f"rank {rank} ({self._where[rank]}) died: {_first_line(causes[rank])}" for rank in died]
        lines += [f"rank {rank} ({self._where[rank]}) does not answer" for rank in silent]
        lines += [
            f"rank {rank} ({self._where[rank]}) failed: {type(cause).__name__}: {_first_line(cause)}"
            for rank, cause in causes.items()
            if rank not in died
        ]
        return f"learner {'; '.join(lines)}; run the step again to go on from its last commit"


class RolloutWorker:
    """Actor: an engine of its own and its own connections to the environments. Its methods run in one event loop."""

    def __init__(self, cfg: RunConfig, files: dict[str, bytes], endpoints: Sequence[str], num_slots: int, drivers_node: str) -> None:
        self._cfg, self._files, self._endpoints, self._num_slots, self._drivers_node = cfg, files, endpoints, num_slots, drivers_node

    async def start(self, weights: np.ndarray[Any, Any], digest: str, version: int) -> tuple[str, str]:
        """Begin with these weights. Result: (where this is, the environment's instructions)."""
        import json

        set_threads()
        if _node() != self._drivers_node:
            for endpoint in self._endpoints:
                if urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1"):
                    raise ValueError(
                        f"environment server {endpoint} can be reached on the machine of the step alone, and this rollout worker is on "
                        f"{socket.gethostname()}; start servers that every node can reach and name them in env.endpoints"
                    )
        model = model_from_blobs(self._files[ARCHITECTURE].decode(), _received(weights, digest, version))
        if self._cfg.ray.worker_gpus:
            model = model.to("cuda")
        self._renderer = ChatRenderer(tokenizer_from_files(json.loads(self._files[TOKENIZER])))
        self._policy = TorchPolicy(
            model, stop_id=self._renderer.stop_id, num_slots=self._num_slots, context_tokens=self._cfg.model.context_tokens
        )
        self._policy.version = version
        self._pool = EnvPool(self._endpoints, request_timeout_s=self._cfg.env.request_timeout_s)
        await self._pool.__aenter__()
        info = await check_endpoints(self._pool, expect_env=self._cfg.env.name, allow_expert=False, expect_options=self._cfg.env.options)
        return f"process {os.getpid()} on {socket.gethostname()}", info[0].instructions if self._cfg.rollout.system_prompt else ""

    async def play(self, item: Item, sample: int, settings: EpisodeSettings) -> Trajectory:
        """One episode, with as many attempts as a failing environment may have; each has a session of its own."""
        rollout = self._cfg.rollout
        trajectories = await collect(
            [item],
            num_samples=1,
            first_sample=sample,
            pool=self._pool,
            policy=self._policy,
            renderer=self._renderer,
            settings=settings,
            concurrency=1,
            episode_timeout_s=rollout.episode_timeout_s,
            max_attempts=rollout.max_attempts,
            max_env_error_frac=1.0,  # of the whole collection, which the driver sees
        )
        return trajectories[0]

    async def publish(self, weights: np.ndarray[Any, Any], digest: str, version: int) -> None:
        """Change weights between turns. Errors: EngineMismatch where others arrived than were sent."""
        await self._policy.publish(load_safetensors(_received(weights, digest, version)), version)

    async def score(self, rows: list[list[int]]) -> list[Tensor]:
        return self._policy.score(rows)


def _received(weights: np.ndarray[Any, Any], digest: str, version: int) -> bytes:
    blob = weights.tobytes()
    came = hashlib.sha256(blob).hexdigest()
    if came != digest:
        raise EngineMismatch(f"weights version {version} arrived at {socket.gethostname()} with sha256 {came[:12]}, sent was {digest[:12]}")
    return blob


@dataclass(frozen=True)
class Published:
    """Weights on their way to the workers."""

    reference: Any  # in the object store
    digest: str  # sha256
    version: int
    ours: Tensor | None = None  # the learner's scores of the canary; None before its first publish


@dataclass(eq=False)
class Worker:
    """The driver's view of a live rollout worker."""

    index: int
    actor: Any
    where: str = "not started yet"
    num_episodes: int = 0  # in flight
    version: int = -1
    gap: float = 0.0  # nats, of its last canary


class RayEngine:
    """An `Engine` whose episodes are played by workers, each episode sent to the least busy one."""

    def __init__(self, cfg: RunConfig, checkpoint: Checkpoint, spawn: Callable[[int], Any], num_workers: int, loop: LoopThread) -> None:
        self.workers: list[Worker] = []
        self._cfg, self._checkpoint, self._spawn, self._num_workers, self._loop = cfg, checkpoint, spawn, num_workers, loop
        self._canary = Canary(checkpoint.tokenizer)
        self._weights = Published(None, "", -1)
        self._system = ""
        self._num_lost = 0
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        self._patience_s = cfg.rollout.max_attempts * cfg.rollout.episode_timeout_s + SLACK_S

    def start(self, version: int) -> None:
        """Bring up all workers with the checkpoint's weights."""
        import ray

        blob = self._checkpoint.blobs()[WEIGHTS]
        self._weights = Published(ray.put(np.frombuffer(blob, np.uint8)), hashlib.sha256(blob).hexdigest(), version)

        async def all_of_them() -> None:
            await asyncio.gather(*(self._bring_up(index) for index in range(self._num_workers)))

        self._run(all_of_them())

    def collect(
        self,
        items: Sequence[Item],
        *,
        num_samples: int,
        step: int,
        max_turns: int,
        temperature: float,
        seed: int,
        first_sample: int = 0,
        read_last: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Trajectory]:
        """As `Engine.collect`: trajectories in admission order. Errors: RolloutError, WorkersLost."""
        rollout = self._cfg.rollout
        settings = episode_settings(
            self._cfg, system=self._system, seed=seed, step=step, max_turns=max_turns, temperature=temperature, read_last=read_last
        )
        slots = asyncio.Semaphore(rollout.concurrency)

        async def one(item: Item, sample: int) -> Trajectory:
            async with slots:
                trajectory = await self._play(item, sample, settings)
            progress(1)
            return trajectory

        async def all_of_them() -> list[Trajectory]:
            return await in_order([one(item, first_sample + sample) for item in items for sample in range(num_samples)])

        trajectories = self._run(all_of_them())
        require_valid(trajectories, max_attempts=rollout.max_attempts, max_env_error_frac=rollout.max_env_error_frac)
        return trajectories

    def publish(self, learner: RayLearner, version: int) -> float:
        """Rank 0 puts the weights into the object store, every worker takes them from there and sings the canary's song.

        Result: the largest difference, nats. Errors: EngineMismatch, WorkersLost.
        """
        digest, reference = learner.export()
        self._weights = Published(reference, digest, version, self._canary.score(learner))

        async def all_of_them() -> float:
            await asyncio.gather(*(self._survive(worker, self._update(worker)) for worker in tuple(self.workers)))
            await self._pick()  # where all were lost, the first replacement has sung
            return max(worker.gap for worker in self.workers)

        return self._run(all_of_them())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        import ray

        try:
            return self._loop.run(coroutine)
        except ray.exceptions.RayTaskError as error:  # raised inside a worker; its own kind says more than Ray's
            raise _cause(error) from None

    async def _play(self, item: Item, sample: int, settings: EpisodeSettings) -> Trajectory:
        """The episode from whichever worker brings it to an end; what a lost worker had of it is dropped."""
        while True:
            worker = await self._pick()
            worker.num_episodes += 1
            try:
                trajectory = await self._survive(worker, _within(worker.actor.play.remote(item, sample, settings), self._patience_s))
            finally:
                worker.num_episodes -= 1
            if trajectory is not None:
                return trajectory

    async def _pick(self) -> Worker:
        """The least busy worker; waits where none is left. Errors: what ended the replacing of lost workers."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self.workers:
                return min(self.workers, key=lambda worker: worker.num_episodes)
            self._changed.clear()
            await self._changed.wait()  # `_replace` has the deadline

    async def _survive(self, worker: Worker, answer: Awaitable[T]) -> T | None:
        """The worker's answer, or None where it is lost; another one then comes up in its place.

        A worker that cannot be reached counts as lost at once: what it still does is heard by nobody.
        """
        import ray

        try:
            return await answer
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._lose(worker, error)
            return None

    def _lose(self, worker: Worker, error: BaseException) -> None:
        if worker not in self.workers:
            return  # another of its episodes was first
        self.workers.remove(worker)
        self._num_lost += 1
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if self._num_lost > self._cfg.ray.max_lost_workers:
            self._fail(
                WorkersLost(
                    f"{self._num_lost} rollout workers were lost (limit ray.max_lost_workers {self._cfg.ray.max_lost_workers}), the last, "
                    f"{worker.where}: {reason}; run the step again to go on from its last commit"
                )
            )
            return
        logger.warning("rollout worker %d (%s) is lost: %s; its unfinished episodes are played again", worker.index, worker.where, reason)
        task = asyncio.get_running_loop().create_task(self._replace(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: Worker) -> None:
        try:
            await asyncio.to_thread(_end, [lost.actor])
            await self._bring_up(lost.index)
        except Exception as error:
            self._fail(_cause(error))

    def _fail(self, error: BaseException) -> None:
        self._failure = error if isinstance(error, Exception) else RuntimeError(str(error))
        self._changed.set()

    async def _bring_up(self, index: int) -> None:
        """A new worker with the present weights. One that is lost while it starts counts like any other."""
        import ray

        worker = Worker(index, await asyncio.to_thread(self._spawn, index))
        weights = self._weights
        try:
            worker.where, self._system = await _within(
                worker.actor.start.remote(weights.reference, weights.digest, weights.version),
                self._cfg.ray.placement_timeout_s + self._cfg.env.start_timeout_s,
            )
            worker.version = weights.version
            await self._update(worker)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.workers.append(worker)
            self._lose(worker, error)
            return
        logger.info("rollout worker %d is %s, weights version %d", index, worker.where, worker.version)
        self.workers.append(worker)
        self._changed.set()

    async def _update(self, worker: Worker) -> None:
        """Bring the worker to the newest weights, which may change meanwhile, and compare its canary."""
        while True:
            weights = self._weights
            if worker.version != weights.version:
                await _within(worker.actor.publish.remote(weights.reference, weights.digest, weights.version), self._patience_s)
                worker.version = weights.version
            if weights.ours is not None:
                scores = await _within(worker.actor.score.remote(self._canary.rows), self._patience_s)
                worker.gap = Canary.compare(weights.ours, scores, weights.version, f"rollout worker {worker.index} ({worker.where})")
            if weights is self._weights:
                return


async def _within(reference: Any, seconds: float) -> Any:
    """Errors: TimeoutError, which says how long was waited."""
    try:
        return await asyncio.wait_for(reference, seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def _cause(error: BaseException) -> BaseException:
    """What was raised inside the actor, where that is what happened."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
