"""A RayJob of Kubernetes (`ray.io/v1`, KubeRay) for one attempt at one step of a run: a Ray cluster
that begins and ends with it.

It also meets KubeRay's own validation, which is stricter than the resource's schema: rayVersion
with authOptions, either shutdownAfterJobFinishes or deletion rules, names of at most 47 characters.

As a program, this module writes the parameters from a variable to a file and becomes the command
that runs the step.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from agentgym.config import ConfigError, KubeRayConfig, RunConfig
from agentgym.deploy.attempts import VARIABLES, Job, arguments, params_text, sent_config
from agentgym.deploy.manifests import RUN_LABEL
from agentgym.private import token_variable
from envs.wire import TOKEN_VARIABLE

Object = dict[str, Any]

STEP_LABEL = "agentgym.io/step"
ROLE_LABEL = "agentgym.io/role"
RUN_KEY_ANNOTATION = "agentgym.io/run-key"  # whole digests: labels and names have their prefixes
STEP_KEY_ANNOTATION = "agentgym.io/step-key"
PARAMS_VARIABLE = "AGENTGYM_PARAMS"
IMAGE_VARIABLE = "AGENTGYM_IMAGE"
SECRETS = ("agentgym-rollout", "agentgym-env-token")  # their keys become variables of the pods
HEAD_CPUS = 1
SUBMITTER_MEMORY_MIB = 512
END_S = 60  # time that a pod has to end cleanly


def rayjob(job: Job, name: str, image: str) -> Object:
    """Return the RayJob that runs the job under that name. image: with a digest, or a tag."""
    cfg, settings = job.cfg, job.cfg.kuberay
    inner = sent_config(cfg)
    alone = inner.compute == "inline"
    labels = {
        "app.kubernetes.io/part-of": "agentgym",
        RUN_LABEL: f"r{job.run_key[:12]}",
        STEP_LABEL: job.step,
    }
    # for Kueue, which admits the whole job, or lets it wait, by `spec.suspend`
    kueue = {"queue-name": settings.queue, "priority-class": settings.priority}
    queue = {f"kueue.x-k8s.io/{key}": value for key, value in kueue.items() if value}
    variables = [
        *({"name": name, "value": value} for name, value in VARIABLES.items()),
        # with credentials, agentgym/trust.py refuses tracking.uri unless this variable has it
        {"name": "MLFLOW_TRACKING_URI", "value": cfg.tracking.uri},
        *_tokens(cfg),
        # Kubernetes reads $(NAME) as a variable and $$ as $
        {"name": PARAMS_VARIABLE, "value": params_text(inner).replace("$", "$$")},
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": name,
            "namespace": cfg.kubernetes.namespace,
            "labels": labels | queue,
            "annotations": {RUN_KEY_ANNOTATION: job.run_key, STEP_KEY_ANNOTATION: job.key},
        },
        "spec": {
            "submissionMode": settings.mode,
            "jobId": name,
            "entrypoint": f"python -m agentgym.deploy.rayjob {arguments(job)}",
            "entrypointNumCpus": cfg.ray.rank_cpus if alone else 0,
            "entrypointNumGpus": cfg.ray.rank_gpus if alone else 0,
            "backoffLimit": 0,  # we count attempts, each under a name of its own
            "activeDeadlineSeconds": round(cfg.ray.job_timeout_s),
            **_deletion(settings),
            "rayClusterSpec": _cluster(cfg, image, labels, variables),
            **_submitter(settings, image, labels),
        },
    }


def _deletion(settings: KubeRayConfig) -> Object:
    """Return the fields of a RayJob's spec that delete its cluster keep_cluster_s seconds after the
    job and, with deletion rules, the RayJob itself after keep_job_s.
    KubeRay accepts shutdownAfterJobFinishes or deletion rules, not both.
    """
    keep_s = settings.keep_cluster_s
    if settings.deletion == "shutdown":
        return {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": keep_s}
    ends = ({"jobStatus": "SUCCEEDED"}, {"jobStatus": "FAILED"}, {"jobDeploymentStatus": "Failed"})
    rules = [
        {"policy": policy, "condition": {**end, "ttlSeconds": ttl_s}}
        for policy, ttl_s in (("DeleteCluster", keep_s), ("DeleteSelf", settings.keep_job_s))
        for end in ends
    ]
    return {"shutdownAfterJobFinishes": False, "deletionStrategy": {"deletionRules": rules}}


def _cluster(
    cfg: RunConfig, image: str, labels: Mapping[str, str], variables: list[Object]
) -> Object:
    settings = cfg.kuberay
    head = _pod(image, labels, variables, cpus=HEAD_CPUS, memory=f"{settings.head_memory_gib}Gi")
    worker = _pod(
        image,
        labels,
        variables,
        cpus=settings.worker_cpus,
        memory=f"{settings.worker_memory_gib}Gi",
        gpus={settings.gpu_resource: settings.worker_gpus} if settings.worker_gpus else {},
    )
    if settings.node_labels:
        worker["spec"]["nodeSelector"] = dict(settings.node_labels)
    return {
        "rayVersion": ray_version(),
        "authOptions": {"mode": "token"},  # empty options would turn nothing on
        "headGroupSpec": {
            # no work on the head: it keeps the cluster's state, and a full memory would end it
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": head,
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu" if settings.worker_gpus else "cpu",
                "replicas": settings.workers,
                "minReplicas": settings.workers,
                "maxReplicas": settings.workers,
                "rayStartParams": {},
                "template": worker,
            }
        ],
    }


def _pod(
    image: str,
    labels: Mapping[str, str],
    variables: list[Object],
    *,
    cpus: int,
    memory: str,
    gpus: Mapping[str, int] | None = None,
    name: str = "ray",
) -> Object:
    """Return the template of a pod with one container that has no privileges. Its requests equal
    its limits, so it is among the last to be evicted.
    memory: for example `8Gi`. gpus: number by resource name. name: the container's.
    """
    sizes = {"cpu": str(cpus), "memory": memory, **{k: str(v) for k, v in (gpus or {}).items()}}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": END_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": name,
                "image": image,
                "env": variables,
                "envFrom": [
                    {"secretRef": {"name": secret, "optional": True}} for secret in SECRETS
                ],
                "resources": {"requests": sizes, "limits": sizes},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "state", "mountPath": "/app/.agentgym"}],
            }
        ],
        "volumes": [{"name": "state", "emptyDir": {}}],
    }
    if gpus:
        spec["tolerations"] = [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in gpus
        ]
    return {"metadata": {"labels": {**labels, ROLE_LABEL: "rollout"}}, "spec": spec}


def _submitter(settings: KubeRayConfig, image: str, labels: Mapping[str, str]) -> Object:
    """Return the spec's fields for the pod that submits the job and prints its log; empty in modes
    other than K8sJobMode. The pod gets none of our secrets.
    If it dies, its replacement finds the submitted job by its id.
    """
    if settings.mode != "K8sJobMode":
        return {}
    pod = _pod(
        image, labels, [], cpus=1, memory=f"{SUBMITTER_MEMORY_MIB}Mi", name="ray-job-submitter"
    )
    pod["spec"]["restartPolicy"] = "Never"
    del pod["spec"]["containers"][0]["envFrom"]
    return {"submitterConfig": {"backoffLimit": 2}, "submitterPodTemplate": pod}


def _tokens(cfg: RunConfig) -> list[Object]:
    """Return variables that give a pod the tokens of the fleets in `env.endpoints`. Each refers to
    the fleet's Secret, which has the name of its Service, for example `env-babyai-r1`.
    The tokens of other servers are in SECRETS.
    """
    service = re.compile(rf"http://(env-[a-z0-9-]+)\.{cfg.kubernetes.namespace}\.svc:\d+")
    secret_names = {
        token_variable(env.name): name[1]
        for env in cfg.envs
        for url in env.endpoints
        if (name := service.fullmatch(url))
    }
    return [
        {
            "name": variable,
            "valueFrom": {"secretKeyRef": {"name": name, "key": TOKEN_VARIABLE, "optional": True}},
        }
        for variable, name in secret_names.items()
    ]


def image_of(environment: Mapping[str, str]) -> str:
    """Return the image that IMAGE_VARIABLE names in the environment. A parameter file must not
    choose it, because the image runs with the run's secrets.
    Errors: ConfigError if it names none.
    """
    image = environment.get(IMAGE_VARIABLE, "")
    if not image:
        raise ConfigError(
            f"compute kuberay: {IMAGE_VARIABLE} names no image in this environment; export the one"
            " that k8s/README.md builds, the same for flow and jobs"
        )
    return image


def ray_version() -> str:
    """Return the version of Ray installed here. Errors: ConfigError without Ray."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "compute kuberay needs Ray here, to name its version; install it from the"
            " checkout: pip install -e '.[cluster]'"
        ) from None


def main() -> None:
    """Write PARAMS_VARIABLE to a file and exec `agentgym step` with that file and our arguments."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False, encoding="utf-8") as file:
        file.write(os.environ[PARAMS_VARIABLE])
    command = [sys.executable, "-m", "agentgym", "step", *sys.argv[1:], "--params", file.name]
    os.execv(sys.executable, command)  # noqa: S606 (the job's process must get the job's signals)


if __name__ == "__main__":
    main()
