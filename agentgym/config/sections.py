"""Every section of params.yaml but `algorithm`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from agentgym.config.section import Section, Seed, operational, setting


class DataConfig(Section):
    path: Path = operational(
        Path("data/AgentGym-RL-Data-ID"),
        "folder of the item lists; their digest is in the keys, not their place",
    )
    trajectories: Path = operational(
        Path("data/trajectories/imported"),
        "folder of others' trajectories, read where warm_start.source says so",
    )
    digest: str = operational(
        "",
        "of the files that are read, 64 hex digits: where the folders are not there, these files"
        " come from the store, which `agentgym data keep` put them into",
        pattern="^$|^[0-9a-f]{64}$",
    )
    validation_fraction: float = setting(
        0.1, "share of the train items kept for validation", gt=0, lt=0.5
    )


class EnvConfig(Section):
    name: str = setting("babyai", "the environment's name", pattern="^[a-z0-9-]+$")
    options: dict[str, Any] = setting(
        {}, "handed to the environment; what is left out is its own default"
    )
    weight: PositiveFloat = setting(
        1.0, "share of the items, against the other environments of the run"
    )
    deploy: Literal["local", "kubernetes"] = operational(
        "local",
        "where its servers are started: local, one process of this machine; kubernetes, a fleet of"
        " pods that comes and goes with the run",
    )
    replicas: Literal["auto"] | PositiveInt = operational(
        "auto",
        "servers of a fleet on Kubernetes; auto: as many as rollout.concurrency episodes need",
    )
    keep: bool = operational(
        False, "its servers outlive the run, for the next one with the same options; envs-down ends"
    )
    endpoints: tuple[str, ...] = operational(
        (), "running servers; a host name stands for all its addresses; empty: they are started"
    )
    dialect: Literal["native", "agentgym", "openenv"] = setting(
        "native",
        "what the endpoints speak: agentgym, AgentGym's own servers; openenv, OpenEnv's contract",
    )
    max_sessions: PositiveInt = operational(
        256, "sessions of one server; of a pod, what its manifest gives it memory for"
    )
    session_ttl_s: PositiveFloat = operational(
        300.0, "seconds after which an idle session is closed"
    )
    request_timeout_s: PositiveFloat = operational(30.0, "seconds for one request to a server")
    start_timeout_s: PositiveFloat = operational(120.0, "seconds until a local server is ready")
    keep_s: PositiveFloat = operational(
        24 * 3600.0,
        "seconds after which a server that is kept ends by itself; a fleet, counted from its last"
        " use, with the next agentgym envs gc",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deploy == "kubernetes" and self.endpoints:
            raise ValueError(
                f"env.endpoints of {self.name} names running servers, and env.deploy kubernetes"
                " starts some; leave one of them out"
            )
        if self.deploy == "local" and self.replicas != "auto":
            raise ValueError(
                f"env.replicas {self.replicas} of {self.name} with env.deploy local: one process"
                " serves all sessions of this machine; leave it out, or use deploy kubernetes"
            )
        if self.endpoints and self.keep:
            raise ValueError(
                f"env.keep of {self.name} with env.endpoints: servers that were started elsewhere"
                " outlive every run; leave it out"
            )
        return self

    @property
    def is_elsewhere(self) -> bool:
        """Whether its servers have programs that need not be on this machine."""
        return bool(self.endpoints) or self.deploy == "kubernetes"


class ChatConfig(Section):
    """How a conversation is written with the chat template of a model."""

    history: Literal["exact", "append"] = setting(
        "exact",
        "exact: a chat template that rewrites earlier turns is refused; append: every turn stays as"
        " it was sampled, whatever the template would make of it later",
    )
    thinking: Literal["auto", "on", "off"] = setting(
        "auto", "enable_thinking of the chat template, where it has that; auto: its own default"
    )


class ModelConfig(Section):
    source: Literal["tiny", "hub"] = setting(
        "tiny", "tiny: from a seed, with its own tokenizer; hub: name a pretrained model"
    )
    name: str = setting(
        "", "source hub: repository or folder, for example Qwen/Qwen2.5-7B-Instruct"
    )
    revision: str | None = setting(None, "source hub: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "what weights are in and computed in; auto: as the model comes (tiny: float32)",
    )
    chat: ChatConfig = ChatConfig()
    context_tokens: PositiveInt = setting(512, "tokens of the longest episode")
    vocab_size: PositiveInt = setting(512, "source tiny: upper bound for the trained tokenizer")
    hidden_size: PositiveInt = setting(96, "source tiny: width")
    num_layers: PositiveInt = setting(2, "source tiny: layers")
    num_heads: PositiveInt = setting(3, "source tiny: attention heads")
    num_kv_heads: PositiveInt = setting(1, "source tiny: heads of keys and values")
    mlp_size: PositiveInt = setting(288, "source tiny: width of the feed-forward layers")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source == "hub" and not self.name:
            raise ValueError(
                "model.name is empty; with source hub name a repository or folder, e.g."
                " Qwen/Qwen2.5-7B-Instruct"
            )
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads < 32:
            raise ValueError(
                f"model.hidden_size {self.hidden_size} / num_heads {self.num_heads} must be a whole"
                " head dimension >= 32 (vLLM)"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} must be a multiple of num_kv_heads"
                f" {self.num_kv_heads}"
            )
        return self


class OptimizerConfig(Section):
    lr: PositiveFloat = setting(5e-4, "learning rate of AdamW after the warm-up")
    warmup_steps: NonNegativeInt = setting(10, "optimizer steps over which the rate grows from 0")
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "course of the learning rate after the warm-up"
    )
    final_lr_fraction: float = setting(
        0.1, "share of lr that is left at the last step (cosine, linear)", ge=0, le=1
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "AdamW's: what a step keeps of the average gradient, and of its square"
    )
    weight_decay: float = setting(0.0, "weight decay of AdamW", ge=0)
    grad_clip: PositiveFloat = setting(0.3, "largest global norm of a gradient")


class WarmStartConfig(Section):
    enabled: bool = setting(
        True, "off: training starts from the model as it comes (real pretrained models)"
    )
    source: Literal["expert", "trajectories"] = setting(
        "expert",
        "expert: the environment's own; trajectories: those in data.trajectories, played again,"
        " among which dpo prefers, too",
    )
    num_demos: PositiveInt = setting(300, "expert episodes, or trajectories")
    steps: PositiveInt = setting(80, "optimizer steps on demonstrations")
    batch_size: PositiveInt = setting(32, "demonstrations per optimizer step")
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(
            lr=2e-3,
            warmup_steps=20,
            schedule="cosine",
            betas=(0.9, 0.98),
            weight_decay=0.01,
            grad_clip=1.0,
        ),
        "of the warm start; training has its own",
    )


class RolloutConfig(Section):
    items_per_step: PositiveInt = setting(16, "items of one optimizer step")
    group_size: PositiveInt = setting(8, "episodes sampled of each item")
    temperature: PositiveFloat = setting(1.0, "temperature of sampling while training")
    max_new_tokens: PositiveInt = setting(6, "tokens of one action, at most")
    observation_tokens: PositiveInt = setting(
        32, "tokens of one observation; to check that the horizon fits the context"
    )
    instructions: bool = setting(False, "episodes begin with the environment's instructions")
    examples: NonNegativeInt = setting(0, "worked examples shown after the instructions")
    action_format: Literal["plain", "react"] = setting(
        "plain", 'plain: the reply is the action; react: the text after "Action:"'
    )
    engine: str = setting(
        "torch",
        "what samples: torch, vllm, or one that an installed package offers as an entry point of"
        " agentgym.engines",
    )
    engine_threads: PositiveInt = operational(
        1,
        "threads of the built-in engine on a CPU, at most one per core; more pays from a pretrained"
        " model's size on; 1 with deterministic and on Ray",
    )
    engine_python: str = operational(
        "",
        "interpreter that vLLM runs in, for example .venv-vllm/bin/python; empty: this one, as in"
        " Ray's workers in any case",
    )
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "what vLLM computes in, whatever the learner's weights are; auto: as these"
    )
    token_numbers_frac: float = setting(
        0.05,
        "share of the episodes learned from whose log-probabilities, entropies, advantages and"
        " ratios are recorded token by token",
        ge=0,
        le=1,
    )
    token_numbers_kib: NonNegativeInt = setting(
        64, "KiB, before compression, of such numbers in one optimizer step, at most"
    )
    concurrency: PositiveInt = operational(256, "episodes in flight")
    publish_timeout_s: PositiveFloat = operational(
        120.0, "seconds for each of the two steps in which new weights reach an engine"
    )
    episode_timeout_s: PositiveFloat = setting(
        120.0,
        "seconds that an episode's environment may take in all; more, and the episode has failed",
    )
    max_attempts: PositiveInt = setting(3, "attempts at an episode whose environment fails")
    max_env_error_frac: float = setting(
        0.1, "share of failed episodes above which the run stops", ge=0, le=1
    )
    max_staleness: NonNegativeInt = setting(
        0,
        "updates that the weights which sampled a turn may be behind those that learn from it; from"
        " 1 on, rollouts of so many later optimizer steps go on beside the update",
    )


class VllmConfig(Section):
    """What vLLM is started with, where rollout.engine is vllm. Its dtype is rollout.engine_dtype,
    its longest sequence model.context_tokens.
    """

    tensor_parallel_size: PositiveInt = operational(1, "processes, each on a GPU, of one engine")
    memory_frac: float = operational(
        0.45, "share of a GPU's memory that the engine may take", gt=0, le=1
    )
    compile: bool = operational(
        True,
        "compile the model and capture CUDA graphs; never on the CPU, where that takes minutes",
    )
    cpu_cache_gib: PositiveInt = operational(1, "GiB for keys and values where it runs on the CPU")
    start_timeout_s: PositiveFloat = operational(600.0, "seconds until the engine is ready")
    keep_s: PositiveFloat = operational(
        900.0, "seconds that `make up` keeps an engine which nobody uses"
    )


class HorizonConfig(Section):
    kind: Literal["fixed", "stepwise", "adaptive"] = setting(
        "stepwise",
        "stepwise is ScalingInter: one stage per value of max_turns; adaptive: one stage, the next"
        " value when success stops growing",
    )
    max_turns: tuple[PositiveInt, ...] = setting(
        (6, 9, 12), "turns an episode may have, by stage", min_length=1
    )
    stage_steps: tuple[PositiveInt, ...] = setting((15, 15, 20), "optimizer steps per stage")
    window: PositiveInt = setting(
        5, "adaptive: optimizer steps whose mean success is compared with that of as many before"
    )
    min_gain: float = setting(0.02, "adaptive: a smaller gain ends the present horizon", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "fixed" and len(self.max_turns) != 1:
            raise ValueError(
                f"horizon.max_turns {list(self.max_turns)} has {len(self.max_turns)} values; a"
                " fixed horizon takes one"
            )
        if self.kind == "adaptive":
            if list(self.max_turns) != sorted(set(self.max_turns)):
                raise ValueError(
                    f"horizon.max_turns {list(self.max_turns)} of an adaptive horizon must grow"
                    " from value to value"
                )
            if len(self.stage_steps) != 1:
                raise ValueError(
                    f"horizon.stage_steps {list(self.stage_steps)} has {len(self.stage_steps)}"
                    " values; an adaptive horizon is one stage"
                )
            return self
        if list(self.max_turns) != sorted(self.max_turns):
            raise ValueError(
                f"horizon.max_turns {list(self.max_turns)} must not decrease; sort it or use a"
                " fixed horizon"
            )
        if len(self.stage_steps) != len(self.max_turns):
            raise ValueError(
                f"horizon.stage_steps {list(self.stage_steps)} has {len(self.stage_steps)} values"
                f" for {len(self.max_turns)} stages; give one number of steps per value of"
                " horizon.max_turns"
            )
        return self


class EvaluationConfig(Section):
    max_turns: PositiveInt = setting(12, "turns an episode may have, the same for every checkpoint")
    split: Literal["test", "validation"] = setting(
        "test", "items to evaluate on; validation: to choose settings by"
    )
    num_items: PositiveInt = setting(512, "items of the split")
    num_samples: PositiveInt = setting(4, "samples of each item, beside one greedy episode")
    temperature: PositiveFloat = setting(1.0, "temperature of the samples")
    k: tuple[PositiveInt, ...] = setting((1, 4), "each k of pass@k", min_length=1)
    confidence: float = setting(0.95, "level of every interval", gt=0.5, lt=1)
    seed: Seed = setting(1, "seed of the samples")
    min_coverage: float = setting(
        0.95,
        "share of episodes that must count, not failed; below it there is no result",
        ge=0,
        le=1,
    )
    chunk_items: PositiveInt = operational(256, "items committed at a time")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if max(self.k) > self.num_samples:
            raise ValueError(
                f"evaluation.k {list(self.k)} needs num_samples >= {max(self.k)}, got"
                f" {self.num_samples}; pass@k is undefined for n < k"
            )
        return self


class ValidationConfig(Section):
    """Success on validation items while training; never used to update weights."""

    every: NonNegativeInt = setting(5, "optimizer steps; 0: never")
    num_items: PositiveInt = setting(64, "validation items, one sample each")
    max_turns: PositiveInt = setting(12, "turns an episode of validation may have")
    temperature: PositiveFloat = setting(1.0, "temperature of sampling")


class PipelineConfig(Section):
    parallel: PositiveInt = operational(
        1, "steps at a time: beside training, evaluations of the checkpoints before it"
    )


class RegistryConfig(Section):
    model_name: str = setting(
        "",
        "name in MLflow's registry: letters, digits, _, - and blanks; empty: agentgym- and the"
        " names of the environments",
        pattern=r"^$|^[\w-][\w -]*$",
        max_length=256,
    )
    alias: str = setting(
        "champion", "alias that the gate moves: letters, digits, _ and -", pattern=r"^[\w-]+$"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """MLflow keeps `latest` and v1, v2, ... for itself."""
        if self.alias == "latest" or re.fullmatch(r"[vV]\d+", self.alias):
            raise ValueError(
                f"registry.alias {self.alias!r} has a meaning of its own in MLflow; name another"
                " one, for example champion"
            )
        return self


class TrackingConfig(Section):
    uri: str = operational("", "MLflow's; empty: SQLite beside the store")
    experiment: str = operational(
        "", "MLflow's experiment; empty: agentgym- and the names of the environments"
    )
    traces: NonNegativeInt = operational(
        4, "episodes of each finished step that become traces in MLflow; 0: none"
    )


class StoreConfig(Section):
    path: Path = operational(
        Path(".agentgym/store"), "folder of all results; logs and other local state lie beside it"
    )
    uri: str = operational(
        "",
        "s3://bucket/prefix; empty: the folder `path`",
        pattern=r"^$|^s3://[a-z0-9][a-z0-9.-]+(/[\w.-]+)*$",
    )
    commit_every: PositiveInt = operational(
        1, "optimizer steps that one commit makes durable; after a kill the others are taken again"
    )
    max_mib_per_minute: NonNegativeFloat = operational(
        8192.0,
        "of commits while training: where they are larger, fewer are made; 0: as many as"
        " commit_every says",
    )
    keep_checkpoints: PositiveInt = operational(2, "resumable commits kept per unfinished step")
    keep_best: bool = operational(
        False,
        "of each stage, the commit that did best in validation keeps its weights, too;"
        " `agentgym export --best` takes it",
    )
    gc_keep_days: NonNegativeFloat = operational(
        14.0, "`agentgym gc` keeps steps younger than so many days, and all that they build on"
    )
    gc_keep_runs: NonNegativeInt = operational(
        5, "and so many of the newest ends of runs, whatever their age"
    )
    lease_ttl_s: PositiveFloat = operational(
        30.0, "seconds after which a silent holder on another host is fenced off"
    )


class KubernetesConfig(Section):
    """The cluster that fleets of environment servers come up on, and RayJobs. Credentials are
    found as kubectl finds them: KUBECONFIG, ~/.kube/config, or the account of the pod this runs in.
    """

    context: str = operational("", "of the kubeconfig; empty: its current one")
    namespace: str = operational(
        "agentgym-fleets",
        "where fleets and RayJobs live; k8s/base prepares it",
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    )
    overlay: str = operational(
        "kind", "the folder of k8s/overlays whose servers are used", pattern="^[a-z0-9-]+$"
    )
    components: tuple[Annotated[str, Field(pattern="^[a-z0-9-]+(/[a-z0-9-]+)*$")], ...] = (
        operational((), "folders of k8s/components beside it, for example autoscale")
    )
    ready_timeout_s: PositiveFloat = operational(
        600.0, "seconds until every server of a fleet is ready, the pull of its image included"
    )
    down_timeout_s: PositiveFloat = operational(
        300.0, "seconds until a fleet is gone; open sessions may hold a server for three minutes"
    )
    lease_s: float = operational(
        120.0, "seconds after which a run that gave no sign counts as dead", ge=15.0
    )
    creates_per_s: PositiveFloat = operational(20.0, "objects sent in a second at most")
    deletes_per_s: PositiveFloat = operational(20.0, "objects deleted in a second at most")


class RayConfig(Section):
    """Where a run's actors live (compute ray) or its jobs go (compute ray-job), and of what size
    they are, there and in the clusters of `kuberay`.
    CPUs and GPUs are what Ray sets aside.
    """

    address: str = operational(
        "",
        "ray: GCS of a cluster this machine is a node of (host:port, auto); empty: a local one that"
        " ends with the step. ray-job: the dashboard of a cluster, http://host:8265",
    )
    num_workers: PositiveInt = operational(1, "processes that play episodes")
    num_ranks: PositiveInt = operational(1, "processes that hold the trained weights")
    worker_cpus: NonNegativeFloat = operational(1.0, "CPUs of one worker")
    worker_gpus: NonNegativeFloat = operational(0.0, "GPUs of one worker")
    rank_cpus: NonNegativeFloat = operational(
        1.0, "CPUs of one rank, and of a job that trains in its own process"
    )
    rank_gpus: NonNegativeFloat = operational(0.0, "GPUs of one rank, and of such a job")
    transport: Literal["object_store", "broadcast"] = operational(
        "object_store",
        "how weights reach the workers: through Ray's object store, or from rank 0 to all at once"
        " (gloo; NCCL between GPUs, where each process has one of its own)",
    )
    max_lost_workers: NonNegativeInt = operational(
        8, "lost workers replaced within one step of the pipeline; one more ends it"
    )
    placement_timeout_s: PositiveFloat = operational(
        120.0, "seconds until the cluster has room, and again until a process is there"
    )
    rank_timeout_s: PositiveFloat = operational(
        1800.0, "seconds of one call of the ranks, and of each exchange between them"
    )
    job_attempts: PositiveInt = operational(
        2, "attempts at one step as a job, each under a name of its own"
    )
    job_timeout_s: PositiveFloat = operational(24 * 3600.0, "seconds of one job")
    shared_paths: bool = operational(
        False,
        "ray-job: the cluster has store.path, data.path and the database of tracking where this"
        " machine has them; otherwise they must be addresses. A cluster of this machine has them",
    )


class KubeRayConfig(Section):
    """The RayJob that one attempt at a step is, where compute is kuberay: a Ray cluster of its own,
    which ends with it, in `kubernetes.namespace`. Its image is that of AGENTGYM_IMAGE, its secrets
    are those of k8s/README.md.
    """

    mode: Literal["K8sJobMode", "HTTPMode"] = operational(
        "K8sJobMode",
        "how KubeRay hands the job to its cluster; K8sJobMode: a pod does, whose log is followed",
    )
    workers: PositiveInt = operational(1, "pods beside the head, which computes nothing")
    worker_cpus: PositiveInt = operational(4, "CPUs of such a pod")
    worker_gpus: NonNegativeInt = operational(0, "GPUs of such a pod")
    worker_memory_gib: PositiveInt = operational(16, "memory of such a pod")
    head_memory_gib: PositiveInt = operational(4, "memory of the head")
    gpu_resource: str = operational(
        "nvidia.com/gpu", "what GPUs are called on nodes, and their taint", pattern="^[a-z0-9./-]+$"
    )
    node_labels: dict[str, str] = operational({}, "labels of the nodes that workers may be on")
    queue: str = operational(
        "", "LocalQueue of Kueue that admits the job whole; empty: none", pattern="^[a-z0-9.-]*$"
    )
    priority: str = operational(
        "", "WorkloadPriorityClass of Kueue; empty: the queue's own", pattern="^[a-z0-9.-]*$"
    )
    queue_timeout_s: PositiveFloat = operational(24 * 3600.0, "seconds in the queue")
    deletion: Literal["shutdown", "rules"] = operational(
        "shutdown",
        "what has an ended job's cluster deleted; shutdown: shutdownAfterJobFinishes; rules:"
        " deletionStrategy.deletionRules, which deletes the RayJob too and needs KubeRay's feature"
        " RayJobDeletionPolicy, on from 1.7",
    )
    keep_cluster_s: NonNegativeInt = operational(
        30, "seconds that an ended job's cluster stays, to look at"
    )
    keep_job_s: NonNegativeInt = operational(
        24 * 3600, "deletion rules: seconds that an ended RayJob stays, to look at"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deletion == "rules" and self.queue:
            raise ValueError(
                f"kuberay.deletion rules with kuberay.queue {self.queue}: Kueue suspends, which"
                " KubeRay allows with shutdownAfterJobFinishes alone; use deletion shutdown"
            )
        if self.deletion == "rules" and self.keep_job_s < self.keep_cluster_s:
            raise ValueError(
                f"kuberay.keep_job_s {self.keep_job_s} is less than keep_cluster_s"
                f" {self.keep_cluster_s}; a cluster does not outlive its RayJob"
            )
        if self.priority and not self.queue:
            raise ValueError(
                f"kuberay.priority {self.priority} is Kueue's, and kuberay.queue names none;"
                " name one, or leave it out"
            )
        return self
