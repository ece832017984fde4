"""Steps as RayJobs of Kubernetes: KubeRay's operator creates a cluster for each, and deletes it.

This module uses the RayJob resource alone, never the cluster's dashboard: the dashboard's token
stays in its Secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.attempts import (
    POLL_S,
    STOP_TIMEOUT_S,
    Job,
    Look,
    Phase,
    RayJobFailed,
    RayUnreachable,
    numbered,
)
from agentgym.deploy.kube.calls import AlreadyExists, ApiUnreachable, KubeError, NotFound, NotServed
from agentgym.deploy.kube.client import POD, Kind, Kube, connect
from agentgym.deploy.manifests import RUN_LABEL
from agentgym.deploy.rayjob import STEP_LABEL, image_of, rayjob

RAY_JOB = Kind("ray.io/v1", "RayJob")
RAY_CLUSTER = Kind("ray.io/v1", "RayCluster")
LOST_S = 10.0  # without its cluster until a job is lost; a suspended one reports that sooner
TAIL_S = 2.0
TAIL_LINES = 500
MESSAGE_CHARS = 2000  # the end of KubeRay's message, which has up to 20,000 of the log
EXIT_CODE = re.compile(r"exit code (\d+)")
QUEUED = ("Suspending", "Suspended")


class KubeRay:
    """Transport of jobs as RayJobs in one namespace of Kubernetes."""

    gone_means = "it was deleted from outside"

    def __init__(self, kube: Kube, image: str) -> None:
        self.place = f"KubeRay in namespace {kube.namespace}"
        self._kube = kube
        self._image = image
        self._clusters: dict[str, str] = {}  # job -> uid of the cluster it was first seen on
        self._missing_since: dict[str, float] = {}  # job -> when its cluster was first missed

    @classmethod
    def connect(cls, cfg: RunConfig) -> Self:
        """Connect to the Kubernetes cluster, and check that it knows RayJobs.
        Errors: ConfigError without an image, credentials or KubeRay; RayUnreachable; KubeError.
        """
        image = image_of(os.environ)
        kube = connect(context=cfg.kubernetes.context, namespace=cfg.kubernetes.namespace)
        try:
            kube.list(RAY_JOB, labels={RUN_LABEL: "none"})
        except (NotServed, NotFound):
            raise ConfigError(
                "compute kuberay: this cluster knows no RayJob (ray.io/v1); install KubeRay 1.5 or"
                " newer, see k8s/README.md"
            ) from None
        except ApiUnreachable as error:
            raise RayUnreachable(str(error)) from None
        return cls(kube, image)

    def attempts(self, job: Job) -> Mapping[int, Look]:
        labels = {RUN_LABEL: f"r{job.run_key[:12]}", STEP_LABEL: job.step}
        resources = self._kube.list(RAY_JOB, labels=labels).items
        looks = {resource["metadata"]["name"]: look_at(resource) for resource in resources}
        return numbered(looks, job)

    def submit(self, job: Job, name: str) -> None:
        """Create the RayJob, unless one of that name exists: another process may have been faster.
        Errors: RayJobFailed if the cluster refuses it; ApiUnreachable.
        """
        try:
            self._kube.create(rayjob(job, name, self._image))
        except AlreadyExists:
            return
        except ApiUnreachable:
            raise
        except KubeError as error:
            raise RayJobFailed(f"{self.place} does not take job {name}: {error}") from None

    def look(self, name: str) -> Look | None:
        resource = self._kube.find(RAY_JOB, name)
        if resource is None:
            return None
        look = look_at(resource)
        if look.phase is Phase.RUNNING and self._is_lost(name, resource["status"]):
            message = "its RayCluster was deleted, or another took its place"
            return Look(Phase.ENDED, "LOST", message, is_lost=True)
        if look.phase is not Phase.RUNNING:
            self._missing_since.pop(name, None)
        return look

    def _is_lost(self, name: str, status: Mapping[str, Any]) -> bool:
        """Return True if the job's RayCluster has been gone, or replaced, for LOST_S."""
        cluster = self._kube.find(RAY_CLUSTER, status.get("rayClusterName") or "none")
        uid = cluster["metadata"]["uid"] if cluster else ""
        if uid and self._clusters.setdefault(name, uid) == uid:
            self._missing_since.pop(name, None)
            return False
        since = self._missing_since.setdefault(name, time.monotonic())
        return time.monotonic() - since >= LOST_S

    async def tail(self, name: str, hear: Callable[[str], None]) -> None:
        """Pass the submitter pod's new log lines to `hear`, until cancelled; none in HTTPMode."""
        previous: list[str] = []
        while True:
            lines = await asyncio.to_thread(self._log, name)
            for line in lines[overlap(previous, lines) :]:
                hear(line)
            previous = lines or previous
            await asyncio.sleep(TAIL_S)

    def _log(self, name: str) -> list[str]:
        pods = self._kube.list(POD, labels={"job-name": name}).items
        if not pods:
            return []
        newest = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        return self._kube.log(newest["metadata"]["name"], lines=TAIL_LINES).splitlines()

    def stop(self, name: str) -> None:
        """Delete the job with all that it owns, and wait until all of it is gone.
        Errors: TimeoutError after STOP_TIMEOUT_S; KubeError.
        """
        self._kube.delete(RAY_JOB, name, propagation="Foreground")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._kube.find(RAY_JOB, name) is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"RayJob {name} is still there {STOP_TIMEOUT_S:g} s after its deletion, with"
                    " what it holds; see that KubeRay's operator runs: it owes a finalizer"
                )
            time.sleep(POLL_S)

    def settle(self, job: Job) -> None:
        """Delete the job's attempts that have ended: their results are in the store."""
        for number, look in self.attempts(job).items():
            if look.phase is Phase.ENDED:
                self._kube.delete(RAY_JOB, job.name(number))


def end_jobs(cfg: RunConfig, run: str) -> int:
    """Delete all RayJobs of a cancelled run, whose own process may have been killed before.
    run: its name, see `run_label`. Result: the number deleted. Errors: ConfigError, KubeError.
    """
    kube = connect(context=cfg.kubernetes.context, namespace=cfg.kubernetes.namespace)
    with contextlib.closing(kube):
        resources = kube.list(RAY_JOB, labels={RUN_LABEL: run}).items
        return sum(kube.delete(RAY_JOB, resource["metadata"]["name"]) for resource in resources)


def look_at(resource: Mapping[str, Any]) -> Look:
    """Return the state that a RayJob reports. Errors: ConfigError if KubeRay finds it invalid."""
    status = resource.get("status") or {}
    deployment, ray = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    message = str(status.get("message", ""))
    state = f"{ray or deployment or 'new'}"
    if resource["metadata"].get("deletionTimestamp"):
        return Look(Phase.ENDED, "DELETED", "it is being deleted", is_stopped=True)
    if deployment == "ValidationFailed":
        raise ConfigError(f"KubeRay refuses RayJob {resource['metadata']['name']}: {message}")
    if deployment in QUEUED or (resource["spec"].get("suspend") and not deployment):
        return Look(Phase.QUEUED, deployment or "Suspended", "it is suspended; a queue admits it")
    if deployment in ("Complete", "Failed"):
        code = EXIT_CODE.search(message)
        reason = status.get("reason", "")
        return Look(
            Phase.ENDED,
            f"{state} ({reason})" if reason else state,
            message=message[-MESSAGE_CHARS:],
            exit_code=int(code[1]) if code else None,
            is_stopped=ray == "STOPPED",
            is_late=reason == "DeadlineExceeded",
        )
    if deployment == "Running" and ray not in ("", "PENDING"):
        return Look(Phase.RUNNING, state)
    return Look(Phase.WAITING, deployment or "new", message or _cluster_says(status))


def _cluster_says(status: Mapping[str, Any]) -> str:
    """Return reason and messages of a RayJob's cluster that is not ready; empty without any."""
    cluster = status.get("rayClusterStatus") or {}
    conditions = cluster.get("conditions") or []
    messages = [condition["message"] for condition in conditions if condition.get("message")]
    return "; ".join([*filter(None, [cluster.get("reason", "")]), *messages])


def overlap(before: list[str], now: list[str]) -> int:
    """Return the largest number of lines that end `before` and also begin `now`."""
    for size in range(min(len(before), len(now)), 0, -1):
        if before[-size:] == now[:size]:
            return size
    return 0
