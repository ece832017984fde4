"""The sections of params.yaml about where and how a run is carried out: steps, store, MLflow,
clusters, alarms, and the gate of the registry. Most of them change no result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from agentgym.config.section import Section, operational, setting


class PipelineConfig(Section):
    parallel: PositiveInt = operational(
        1,
        "steps that run at the same time; from 2 on, earlier checkpoints are evaluated during"
        " training",
    )


class RegistryConfig(Section):
    model_name: str = setting(
        "",
        "name in MLflow's model registry: letters, digits, _, - and blanks; empty: agentgym- and"
        " the names of the environments",
        pattern=r"^$|^[\w-][\w -]*$",
        max_length=256,
        examples=["my-agent"],
    )
    alias: str = setting(
        "champion",
        "alias that marks the accepted model and that the gate moves: letters, digits, _ and -",
        pattern=r"^[\w-]+$",
    )

    def problems(self) -> Iterator[str]:
        """Refuse the aliases `latest` and v1, v2, ..., which MLflow reserves."""
        if self.alias == "latest" or re.fullmatch(r"[vV]\d+", self.alias):
            yield (
                f"registry.alias {self.alias!r} has a meaning of its own in MLflow; name another"
                " one, for example champion"
            )


class TrackingConfig(Section):
    uri: str = operational(
        "",
        "address of the MLflow server; empty: an SQLite file next to the store",
        examples=["https://mlflow.example.com"],
    )
    experiment: str = operational(
        "",
        "name of MLflow's experiment; empty: agentgym- and the names of the environments",
        examples=["my-experiment"],
    )
    traces: NonNegativeInt = operational(
        4, "episodes of each finished step that are sent to MLflow as traces; 0: none"
    )


class StoreConfig(Section):
    path: Path = operational(
        Path(".agentgym/store"),
        "folder of all results; logs and other local state are stored next to it",
    )
    uri: str = operational(
        "",
        "s3://bucket/prefix to keep results on S3; empty: the folder `path`",
        pattern=r"^$|^s3://[a-z0-9][a-z0-9.-]+(/[\w.-]+)*$",
        examples=["s3://my-bucket/runs"],
    )
    commit_every: PositiveInt = operational(
        1,
        "optimizer steps per commit. A killed run repeats the steps after its last commit; a"
        " higher value saves disk writes",
    )
    max_mib_per_minute: NonNegativeFloat = operational(
        8192.0,
        "most MiB of commits per minute of training; if they are larger, fewer are made. 0: no"
        " limit, commit_every alone decides",
    )
    keep_checkpoints: PositiveInt = operational(
        2, "commits to resume from that are kept per unfinished step"
    )
    keep_best: bool = operational(
        False,
        "keep, for each stage, also the weights of the commit that did best in validation;"
        " `agentgym export --best` exports them",
    )
    gc_keep_days: NonNegativeFloat = operational(
        14.0, "`agentgym gc` keeps steps younger than this many days and everything they build on"
    )
    gc_keep_runs: NonNegativeInt = operational(
        5, "`agentgym gc` also keeps this many of the newest final steps of runs, of any age"
    )
    lease_ttl_s: PositiveFloat = operational(
        30.0, "seconds without a sign of life after which another host's process loses its step"
    )


class KubernetesConfig(Section):
    """The cluster for fleets of environment servers and for RayJobs. Credentials are those
    that kubectl uses: KUBECONFIG, ~/.kube/config, or the service account of this process's pod.
    """

    context: str = operational(
        "", "context of the kubeconfig; empty: its current context", examples=["kind-agentgym"]
    )
    namespace: str = operational(
        "agentgym-fleets",
        "namespace of fleets and RayJobs; k8s/base prepares it",
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    )
    overlay: str = operational(
        "kind", "folder of k8s/overlays that describes the servers", pattern="^[a-z0-9-]+$"
    )
    components: tuple[Annotated[str, Field(pattern="^[a-z0-9-]+(/[a-z0-9-]+)*$")], ...] = (
        operational((), "folders of k8s/components to add to the overlay", examples=[["autoscale"]])
    )
    ready_timeout_s: PositiveFloat = operational(
        600.0, "seconds until every server of a fleet must be ready, including the image pull"
    )
    down_timeout_s: PositiveFloat = operational(
        300.0,
        "seconds until a fleet must be gone; open sessions may keep a server for three minutes",
    )
    lease_s: float = operational(
        120.0,
        "seconds without a sign of life after which a run counts as dead and its fleet may be"
        " removed",
        ge=15.0,
    )
    creates_per_s: PositiveFloat = operational(20.0, "most objects created per second")
    deletes_per_s: PositiveFloat = operational(20.0, "most objects deleted per second")


class RayConfig(Section):
    """The Ray cluster for a run's actors (compute ray) or jobs (compute ray-job), and the size of
    both; the sizes also hold for the clusters of compute kuberay.
    """

    address: str = operational(
        "",
        "compute ray: GCS address of a cluster that this machine is a node of (host:port, or"
        " auto); empty: a local cluster that ends with the step. compute ray-job: dashboard of a"
        " cluster",
        examples=["http://10.0.0.5:8265"],
    )
    num_workers: PositiveInt = operational(1, "rollout workers: processes that play episodes")
    num_ranks: PositiveInt = operational(
        1, "learner ranks: processes that share the trained weights"
    )
    worker_cpus: NonNegativeFloat = operational(1.0, "CPUs reserved per rollout worker")
    worker_gpus: NonNegativeFloat = operational(0.0, "GPUs reserved per rollout worker")
    rank_cpus: NonNegativeFloat = operational(
        1.0, "CPUs reserved per learner rank, or per job that trains in its own process"
    )
    rank_gpus: NonNegativeFloat = operational(
        0.0, "GPUs reserved per learner rank, or per such job"
    )
    transport: Literal["object_store", "broadcast"] = operational(
        "object_store",
        "how weights reach the workers. object_store: through Ray's object store; broadcast: from"
        " rank 0 to all workers at once (gloo, or NCCL if each process has its own GPU)",
    )
    max_lost_workers: NonNegativeInt = operational(
        8, "lost workers that are replaced in one step of the pipeline; one more ends the step"
    )
    placement_timeout_s: PositiveFloat = operational(
        120.0, "seconds to wait for room in the cluster, and again for each process to start"
    )
    rank_timeout_s: PositiveFloat = operational(
        1800.0, "seconds for one call of the learner ranks, and for each exchange between them"
    )
    job_attempts: PositiveInt = operational(
        2, "attempts at a step that runs as a job; each attempt has its own job name"
    )
    job_timeout_s: PositiveFloat = operational(24 * 3600.0, "seconds that one job may run")
    shared_paths: bool = operational(
        False,
        "compute ray-job: true if the cluster sees store.path, data.path and the tracking database"
        " under the same paths as this machine; otherwise give them as addresses. Not needed for a"
        " cluster on this machine",
    )


class KubeRayConfig(Section):
    """The RayJob of compute kuberay: each attempt at a step gets its own Ray cluster, which ends
    with the attempt, in `kubernetes.namespace`. AGENTGYM_IMAGE names the image; k8s/README.md lists
    the secrets.
    """

    mode: Literal["K8sJobMode", "HTTPMode"] = operational(
        "K8sJobMode",
        "how KubeRay submits the job. K8sJobMode: by a pod whose log is followed; HTTPMode: by a"
        " request to the cluster",
    )
    workers: PositiveInt = operational(
        1, "worker pods, in addition to the head, which computes nothing"
    )
    worker_cpus: PositiveInt = operational(4, "CPUs per worker pod")
    worker_gpus: NonNegativeInt = operational(0, "GPUs per worker pod")
    worker_memory_gib: PositiveInt = operational(16, "GiB of memory per worker pod")
    head_memory_gib: PositiveInt = operational(4, "GiB of memory of the head")
    gpu_resource: str = operational(
        "nvidia.com/gpu",
        "resource name of GPUs on the nodes, and key of their taint",
        pattern="^[a-z0-9./-]+$",
    )
    node_labels: dict[str, str] = operational(
        {},
        "labels that a node must have to run workers",
        examples=[{"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}],
    )
    queue: str = operational(
        "",
        "LocalQueue of Kueue that admits the whole job at once; empty: no Kueue",
        pattern="^[a-z0-9.-]*$",
        examples=["gpu-queue"],
    )
    priority: str = operational(
        "",
        "WorkloadPriorityClass of Kueue; empty: the queue's default",
        pattern="^[a-z0-9.-]*$",
        examples=["low"],
    )
    queue_timeout_s: PositiveFloat = operational(
        24 * 3600.0, "seconds that a job may wait in the queue"
    )
    deletion: Literal["shutdown", "rules"] = operational(
        "shutdown",
        "how the cluster of an ended job is deleted. shutdown: by shutdownAfterJobFinishes; rules:"
        " by deletionStrategy.deletionRules, which also delete the RayJob and need KubeRay's"
        " feature RayJobDeletionPolicy (on from 1.7)",
    )
    keep_cluster_s: NonNegativeInt = operational(
        30, "seconds that the cluster of an ended job is kept for inspection"
    )
    keep_job_s: NonNegativeInt = operational(
        24 * 3600, "deletion rules: seconds that an ended RayJob is kept for inspection"
    )

    def problems(self) -> Iterator[str]:
        if self.deletion == "rules" and self.queue:
            yield (
                f"kuberay.deletion rules with kuberay.queue {self.queue}: Kueue suspends, which"
                " KubeRay allows with shutdownAfterJobFinishes alone; use deletion shutdown"
            )
        if self.deletion == "rules" and self.keep_job_s < self.keep_cluster_s:
            yield (
                f"kuberay.keep_job_s {self.keep_job_s} is less than keep_cluster_s"
                f" {self.keep_cluster_s}; a cluster does not outlive its RayJob"
            )
        if self.priority and not self.queue:
            yield (
                f"kuberay.priority {self.priority} is Kueue's, and kuberay.queue names none;"
                " name one, or leave it out"
            )


class GateConfig(Section):
    """The rules of a promotion: see docs/concepts/gate.md. Success is a share of the episodes."""

    protocol: str = setting(
        "",
        "protocol of `agentgym evaluate` that judges both models on the gate's items; empty: the"
        " run's own evaluation",
        examples=["gate.yaml"],
    )
    confidence: float = setting(0.95, "level of every one-sided bound", gt=0.5, lt=1)
    min_gain: float = setting(
        0.0, "success over the champion that the gain's lower bound must exceed", ge=0, lt=1
    )
    worth: float = setting(
        0.05,
        "gain over min_gain that the items must be able to show, at power 0.8; with fewer items"
        " the candidate is held",
        gt=0,
        lt=1,
    )
    margin: float = setting(0.05, "success that one of several environments may lose", ge=0, lt=1)
    margins: dict[str, float] = setting(
        {}, "the same, of single environments", examples=[{"babyai": 0.02}]
    )
    family_margin: float = setting(
        0.1, "success that a family of items may be shown to lose", ge=0, lt=1
    )
    min_success: float = setting(
        0.2, "floor of the success's lower bound, of the first champion, too; 0: none", ge=0, lt=1
    )
    min_coverage: float = setting(
        0.95, "share of both models' episodes that must count", ge=0, le=1
    )
    min_items: PositiveInt = setting(50, "items of each environment, at least")
    max_length_ratio: PositiveFloat | None = setting(
        2.0, "tokens generated in an episode, relative to the champion's; null: any"
    )
    max_reference_kl: NonNegativeFloat | None = setting(
        None,
        "nats per action token from the reference at the end of training; null: any",
        examples=[0.1],
    )
    max_looks: PositiveInt = setting(
        20, "candidates that one set of items may judge; after that it is used up"
    )
    require_audit: bool = setting(
        False, "audit the run first, and reject a model whose audit fails"
    )


# YAML reads a bare `off` as false
Action = Annotated[
    Literal["off", "warn", "stop"],
    BeforeValidator(lambda value: "off" if value is False else value),
]


class AlarmConfig(Section):
    """The action of one alarm. Subclasses add the limit of its measure."""

    action: Action = operational("warn", "off, warn, or stop after the next commit")


class EntropyAlarm(AlarmConfig):
    min: NonNegativeFloat = operational(0.02, "nats per action token; below, it has collapsed")


class GradientAlarm(AlarmConfig):
    max_factor: PositiveFloat = operational(20.0, "gradient norm, in multiples of the usual one")


class UpdateKlAlarm(AlarmConfig):
    max: PositiveFloat = operational(
        0.2, "nats per action token between the policy before an update and after"
    )


class ZeroVarianceAlarm(AlarmConfig):
    max_frac: float = operational(0.99, "share of the groups of equal rewards", gt=0, le=1)


class SuccessAlarm(AlarmConfig):
    max_drop: float = operational(
        0.2, "success below the best so far, as a share of the episodes", gt=0, le=1
    )


class MismatchAlarm(AlarmConfig):
    max_kl: PositiveFloat = operational(
        0.03,
        "nats per action token, engine against learner; algorithm.max_mismatch_kl ends a run"
        " with any action",
    )


class ThroughputAlarm(AlarmConfig):
    min_frac: float = operational(0.5, "share of the usual tokens per second", ge=0, lt=1)


class AlarmsConfig(Section):
    """A section for each alarm: its action and the limit of its measure; docs/reference/alarms.md.

    They are operational, so that `alarms` is empty in every key and record.
    """

    no_success: Action = operational(
        "stop",
        "a stage begins with groups of equal rewards, and neither they nor the evaluation of the"
        " weights it begins with has a success: off, warn, or stop before the first update",
    )
    entropy: EntropyAlarm = operational(EntropyAlarm(), "entropy collapse")
    gradient: GradientAlarm = operational(GradientAlarm(), "gradient spike")
    update_kl: UpdateKlAlarm = operational(UpdateKlAlarm(), "update that moves the policy far")
    zero_variance: ZeroVarianceAlarm = operational(ZeroVarianceAlarm(), "groups that teach nothing")
    success: SuccessAlarm = operational(SuccessAlarm(), "success falls")
    mismatch: MismatchAlarm = operational(MismatchAlarm(), "engine and learner differ")
    throughput: ThroughputAlarm = operational(ThroughputAlarm(), "throughput falls")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """Raise ValueError for a flat setting of earlier versions (`entropy: warn`,
        `min_entropy: 0.02`), with its name today.
        """
        for name, value in values.items() if isinstance(values, dict) else ():
            for alarm, info in cls.model_fields.items():
                today = "action" if name == alarm else str(name).replace(f"_{alarm}", "")
                is_flat = today != name and not isinstance(value, (dict, Section))
                if is_flat and today in getattr(info.annotation, "model_fields", ()):
                    raise ValueError(f"alarms.{name} is now alarms.{alarm}.{today}")
        return values
