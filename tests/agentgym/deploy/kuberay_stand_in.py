"""Stand-in for KubeRay's operator. Tests with it cover our client, not KubeRay.

It creates RayClusters that are objects only, and runs the jobs' entrypoints on one local Ray
cluster. Like KubeRay in HTTPMode it submits a job once its cluster exists, copies the job's
status into the resource, deletes the cluster of an ended job, and ends a job whose resource is
deleted. If a cluster is deleted, its job's processes are killed and the status stays RUNNING.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import psutil

from agentgym.deploy.kube.calls import NotFound
from agentgym.deploy.kube.client import Kind, Kube
from agentgym.deploy.kuberay import RAY_CLUSTER, RAY_JOB

POLL_S = 0.3
SECRET = Kind("v1", "Secret")


class StandIn:
    """Stand-in whose jobs run in `folder`; `client` is the local cluster's Jobs API client."""

    def __init__(self, kube: Kube, client, folder: Path) -> None:
        self.kube, self._client, self._folder = kube, client, folder
        self.ran: list[str] = []  # job names, in order
        self.errors: list[str] = []
        self._clusters: dict[str, str] = {}  # running job -> its RayCluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        for name in list(self._clusters):
            self._kill(name)

    def _watch(self):
        while not self._stop.wait(POLL_S):
            try:
                self._reconcile()
            except Exception as error:  # reported by the waiting test
                self.errors.append(f"{type(error).__name__}: {error}")

    def _reconcile(self):
        jobs = {each["metadata"]["name"]: each for each in self.kube.list(RAY_JOB).items}
        for name, job in jobs.items():
            if job["metadata"].get("deletionTimestamp"):
                continue
            status = job.get("status") or {}
            if not status.get("jobDeploymentStatus"):
                self._begin(name, job)
            elif status["jobDeploymentStatus"] == "Running" and name in self._clusters:
                self._follow(name)
        for name in [each for each in self._clusters if each not in jobs]:
            self._client.stop_job(name)
            del self._clusters[name]

    def _begin(self, name, job):
        self.kube.create(cluster_of(job))
        cluster = f"{name}-cluster"
        self._says(name, "Initializing", jobId=name, rayClusterName=cluster)
        spec = job["spec"]
        head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        folder = self._folder / name  # like /app of a pod: no files of other attempts
        folder.mkdir()
        self._client.submit_job(
            entrypoint=f"cd {shlex.quote(str(folder))} && exec {spec['entrypoint']}",
            submission_id=spec["jobId"],
            runtime_env={"env_vars": self._environment(head)},
            entrypoint_num_cpus=spec["entrypointNumCpus"],
        )
        self._clusters[name] = cluster
        self.ran.append(name)
        self._says(name, "Running", "PENDING")

    def _environment(self, container):
        """Return the variables a kubelet would set: literals ($$ is $), Secrets, and PATH."""
        found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        found |= {each["name"]: each["value"].replace("$$", "$") for each in container["env"]}
        for each in container["envFrom"]:
            with contextlib.suppress(NotFound):
                secret = self.kube.get(SECRET, each["secretRef"]["name"])
                found |= {k: base64.b64decode(v).decode() for k, v in secret["data"].items()}
        return found

    def _follow(self, name):
        if self.kube.find(RAY_CLUSTER, self._clusters[name]) is None:
            self._kill(name)
            return
        job = self._client.get_job_info(name)
        status = str(job.status)
        if not job.status.is_terminal():
            self._says(name, "Running", status)
            return
        self._says(
            name,
            "Failed" if status == "FAILED" else "Complete",
            status,
            message=job.message,
            **({"reason": "AppFailed"} if status == "FAILED" else {}),
        )
        self.kube.delete(RAY_CLUSTER, self._clusters.pop(name))  # shutdownAfterJobFinishes

    def lose_cluster(self, name):
        """Kill a running job and delete its cluster. Return False if none runs."""
        if name not in self._clusters:
            return False
        cluster = self._clusters[name]
        self._kill(name)
        return self.kube.delete(RAY_CLUSTER, cluster)

    def _kill(self, name):
        """Kill the step's processes with SIGKILL and forget the job, as when its pod is gone."""
        self._clusters.pop(name, None)
        for process in psutil.process_iter(["cmdline", "cwd"]):
            with contextlib.suppress(psutil.Error, TypeError):
                if process.info["cwd"] == str(self._folder / name):
                    os.kill(process.pid, signal.SIGKILL)

    def _says(self, name, deployment, ray=None, **more):
        status = {"jobDeploymentStatus": deployment, "jobStatus": ray, **more}
        with contextlib.suppress(NotFound):
            self.kube.patch(RAY_JOB, name, {"status": status}, subresource="status")


def cluster_of(job):
    """Return the RayCluster of a job; its owner reference deletes it with the job."""
    metadata = job["metadata"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "controller": True}
    owner |= {"name": metadata["name"], "uid": metadata["uid"], "blockOwnerDeletion": True}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": f"{metadata['name']}-cluster", "ownerReferences": [owner]},
        "spec": job["spec"]["rayClusterSpec"],
    }
