"""A run spread over processes of a Ray cluster: ranks hold the weights, workers play episodes.

`RayLearner` and `RayEngine` are a `Learner` and an `Engine`.
A lost worker is replaced, and its unfinished episodes are played again by other workers.
A lost rank ends the step, which resumes from its last commit when it is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.compute.learner_ranks import LearnerRank, RayLearner
from agentgym.compute.rollout_workers import RayEngine
from agentgym.compute.transfer import SENDING, end, node_id
from agentgym.compute.worker import RolloutWorker, WorkerPlan
from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.attempts import RayUnreachable
from agentgym.deploy.rayjobs import auth_headers, forget_token
from agentgym.learner.start import LearnerPlan
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.tensorfiles import StoredTensors
from agentgym.rollouts.engine import LoopThread
from agentgym.rollouts.policies.hosts import variables_kept
from agentgym.types import Endpoints

CONNECT_TIMEOUT_S = 10.0  # to the cluster's port
TEMP_PREFIX = "agentgym-ray-"  # folder of a local cluster
# a socket's path has at most 107 bytes: the state folder and TMPDIR may be too long
TEMP_ROOT = Path("/tmp")  # noqa: S108
ATTEMPTS = 8  # to make that folder
_in_use = threading.Lock()  # Ray knows one cluster per process
_token = secrets.token_hex(32)  # of this process's local clusters


class PlacementError(RuntimeError):
    """The cluster has no room for the resources that the run requests."""


@contextmanager
def open_cluster(cfg: RunConfig, *, num_ranks: int, num_workers: int) -> Iterator[Cluster]:
    """Yield a `Cluster` of this many actors on the Ray cluster at `ray.address` or, if that is
    empty, on a local one that ends with the block.
    Errors: PlacementError without room within `ray.placement_timeout_s`; those of `connected`.
    """
    settings = cfg.ray
    rank = _bundle(settings.rank_cpus, settings.rank_gpus)
    worker = _bundle(settings.worker_cpus, settings.worker_gpus)
    bundles = [rank] * num_ranks + [worker] * num_workers
    num_cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    with connected(settings.address, num_cpus=num_cpus) as folder, _placed(cfg, bundles) as group:
        yield Cluster(cfg, group, num_ranks, num_workers, folder)


class Cluster:
    """Actors of one step in a placement group: the ranks of a `learner` in its first bundles, then
    the workers of an `engine`. Making the object starts all their processes at once.
    """

    def __init__(
        self, cfg: RunConfig, group: Any, num_ranks: int, num_workers: int, folder: Path | None
    ) -> None:
        """Start the actors in a placement group. folder: a local cluster's, mode 0700, or None."""
        self._cfg, self._group, self._folder = cfg, group, folder
        self._num_ranks, self._num_workers = num_ranks, num_workers
        self._num_slots = -(-cfg.rollout.concurrency // max(1, num_workers))
        settings = cfg.ray
        cpus, gpus = settings.rank_cpus, settings.rank_gpus
        self._ranks = [
            self._actor(rank, LearnerRank, cpus, gpus, groups={SENDING: 1}).remote(
                rank, num_ranks, cfg.compute_device, settings.rank_timeout_s
            )
            for rank in range(num_ranks)
        ]
        self._fresh = {index: self._new_worker(index) for index in range(num_workers)}

    @contextmanager
    def learner(self, plan: LearnerPlan) -> Iterator[RayLearner]:
        """Build the plan's learner over the ranks and yield it; the ranks end with the block.
        Errors: RankLost; a rank's own, see `RayLearner`.
        """
        start_timeout_s, timeout_s = self._cfg.ray.placement_timeout_s, self._cfg.ray.rank_timeout_s
        try:
            learner = RayLearner(self._ranks, start_timeout_s=start_timeout_s, timeout_s=timeout_s)
            learner.join(plan, self._folder)
            with contextlib.closing(learner):
                yield learner
        finally:
            end(self._ranks)

    @contextmanager
    def engine(
        self, checkpoint: Checkpoint, endpoints: Endpoints, *, version: int
    ) -> Iterator[RayEngine]:
        """Yield an engine whose workers hold the checkpoint's weights, which are version `version`;
        the workers end with the block. Errors: those of `RolloutWorker.start`; WorkersLost.
        """
        cfg, slots, weights = self._cfg, self._num_slots, checkpoint.weights
        assert isinstance(weights, StoredTensors)
        files, adapter = checkpoint.files(), checkpoint.adapter
        plan = WorkerPlan(cfg, files, weights, version, endpoints, slots, node_id(), adapter)
        with contextlib.closing(LoopThread()) as loop:
            engine = RayEngine(plan, checkpoint, self._spawn, self._num_workers, loop)
            with contextlib.closing(engine):
                engine.start()
                yield engine

    def _spawn(self, index: int) -> Any:
        return self._fresh.pop(index, None) or self._new_worker(index)

    def _new_worker(self, index: int) -> Any:
        settings = self._cfg.ray
        return self._actor(
            self._num_ranks + index,
            RolloutWorker,
            settings.worker_cpus,
            settings.worker_gpus,
            max_concurrency=self._num_slots + 8,  # 8: publish, canary and other calls
        ).remote()

    def _actor(
        self, bundle: int, kind: type, cpus: float, gpus: float, groups: Any = None, **options: Any
    ) -> Any:
        """Return `kind` as an actor class that is placed in this bundle and never restarted.
        groups: number of threads by concurrency group. options: further ones of Ray.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        remote = ray.remote(concurrency_groups=groups) if groups else ray.remote
        return remote(kind).options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
            **options,
        )


@contextmanager
def connected(address: str, *, num_cpus: float) -> Iterator[Path | None]:
    """Connect this process for the block as a driver: to the Ray cluster at `address` or, if that
    is empty, to a new local cluster of at least `num_cpus` logical CPUs.

    A local cluster listens on loopback alone and requires a token of this process.
    It ends with the block, also if this process is killed: its servers die with the thread that
    started them, its workers with the servers, and its two agents after a minute without them. The
    next local cluster removes the folder that a killed process leaves.
    Ray's environment variables for address and token are changed, and restored after the block.
    Yield the local cluster's folder, mode 0700, or None for a cluster at an address.
    Errors: RayUnreachable; ConfigError without Ray or for a malformed address; RuntimeError if
    another block of this process is connected.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"compute ray needs Ray ({error}); install it from the"
            " checkout: pip install -e '.[cluster]'"
        ) from None
    if not _in_use.acquire(blocking=False):
        raise RuntimeError(
            "another step of this process runs on Ray, which knows one cluster per process; run"
            " them one after the other"
        )
    try:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        with (
            variables_kept("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"),
            contextlib.ExitStack() as stack,
        ):
            forget_token()
            options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}
            folder = None
            try:
                if address:
                    _join(ray, address, options)
                else:
                    folder = stack.enter_context(_temp_folder())
                    # its own token, whatever is set for other clusters
                    os.environ["RAY_AUTH_TOKEN"] = _token
                    # without these a new cluster requires the token, Ray's default
                    for name in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
                        os.environ.pop(name, None)
                    options |= {
                        "num_cpus": max(1, round(num_cpus + 0.5)),
                        "include_dashboard": False,
                    }
                    with _loopback():
                        # Ray makes its own folder readable to all users
                        ray.init("local", _temp_dir=str(folder / "r"), **options)
                if in_main_thread:
                    # Ray's handler would end the process silently
                    signal.signal(signal.SIGTERM, handler)
                yield folder
            finally:
                ray.shutdown()
    finally:
        _in_use.release()


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Join the cluster at `address`: host:port, or "auto" for this machine's. options: of ray.init.
    Errors: RayUnreachable, also if a token is missing or wrong; ConfigError for another form.
    """
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    advice = (
        "start the cluster, or correct ray.address (host:port of its GCS; this machine must be one"
        " of its nodes)"
    )
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not (host and port.isdigit()):
            raise ConfigError(
                f"ray.address {address!r} must be host:port of a cluster's GCS, auto, or empty for"
                " a local cluster"
            )
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:  # Ray itself would try for minutes, and then end this process
            raise RayUnreachable(
                f"no Ray cluster answers at {address} ({error}); {advice}"
            ) from None
    # clusters require a token by default, but Ray's clients send one only if configured to
    if auth_headers(os.environ):
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RayUnreachable(
            f"the Ray cluster at {address} cannot be joined: {reason}; {advice}"
        ) from None


@contextmanager
def _loopback() -> Iterator[None]:
    """Let a Ray cluster that is started in the block listen on loopback alone."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _temp_folder() -> Iterator[Path]:
    """Yield a folder with a short, unpredictable path and mode 0700; remove it after the block.
    Folders of killed processes are removed first.
    Errors: RuntimeError if no new folder can be locked.
    """
    for stale in TEMP_ROOT.glob(f"{TEMP_PREFIX}*"):
        _remove(stale, _hold(stale, wait=False))
    # before it is locked, another run may remove it as a stale one
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=TEMP_ROOT))
        lock = _hold(folder, wait=True)
        if lock is not None:
            break
    else:
        raise RuntimeError(
            f"no folder for a Ray cluster could be locked in {TEMP_ROOT}: each was removed as soon"
            " as it was made"
        )
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _hold(folder: Path, *, wait: bool) -> int | None:
    """Lock the folder until the returned descriptor is closed or this process ends. Return None if
    it is another user's, gone, no folder or, without `wait`, locked by another process.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), folder.lstat()):
                return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, lock: int | None) -> None:
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


@contextmanager
def _placed(cfg: RunConfig, bundles: list[dict[str, float]]) -> Iterator[Any]:
    """Reserve the bundles (resource -> amount) for the block and yield their placement group.
    Errors: PlacementError if there is no room within `ray.placement_timeout_s`.
    """
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
        amounts = [f"{name} {resources[name]:g}" for name in ("CPU", "GPU") if name in resources]
        return ", ".join(amounts) or "nothing"

    free = available_resources_per_node()
    nodes = [
        f"node {node['NodeManagerAddress']} has {spell(node['Resources'])}, of which free"
        f" {spell(free.get(node['NodeID'], {}))}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    requested = [
        f"{bundles.count(bundle)} x ({spell(bundle)})"
        for bundle in {str(bundle): bundle for bundle in bundles}.values()
    ]
    return (
        "the Ray cluster has no room for this run within ray.placement_timeout_s"
        f" {cfg.ray.placement_timeout_s:g}: asked for {' and '.join(requested)};"
        f" {'; '.join(nodes) or 'no node is alive'}. Lower ray.num_workers, ray.num_ranks or what"
        " each takes, or add nodes"
    )
