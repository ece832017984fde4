"""The sections of params.yaml, except `algorithm`."""

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
        "folder of the item lists; change it to train on other items. Its contents are part of the"
        " keys, its path is not",
    )
    trajectories: Path = operational(
        Path("data/trajectories/imported"),
        "folder of recorded trajectories, read if warm_start.source is trajectories",
    )
    digest: str = operational(
        "",
        "sha256 of the data files, 64 hex digits; if the folders are missing, these files are"
        " fetched from the store. `agentgym data keep` stores them",
        pattern="^$|^[0-9a-f]{64}$",
    )
    validation_fraction: float = setting(
        0.1, "share of the training items that is set aside for validation", gt=0, lt=0.5
    )


class EnvConfig(Section):
    name: str = setting("babyai", "name of the environment", pattern="^[a-z0-9-]+$")
    options: dict[str, Any] = setting(
        {}, "options of the environment, see its README; those left out have its defaults"
    )
    weight: PositiveFloat = setting(
        1.0, "share of the items, relative to the weights of the run's other environments"
    )
    deploy: Literal["local", "kubernetes"] = operational(
        "local",
        "where its servers start. local: one process on this machine; kubernetes: pods that start"
        " and end with the run",
    )
    replicas: Literal["auto"] | PositiveInt = operational(
        "auto",
        "servers to start on Kubernetes; auto: enough for rollout.concurrency episodes",
    )
    keep: bool = operational(
        False, "leave its servers running for later runs with the same options; envs-down ends them"
    )
    endpoints: tuple[str, ...] = operational(
        (),
        "URLs of running servers; a host name stands for all its addresses. Empty: the run starts"
        " the servers",
    )
    dialect: Literal["native", "agentgym", "openenv"] = setting(
        "native",
        "protocol of the endpoints. native: servers of this project; agentgym: AgentGym's servers;"
        " openenv: OpenEnv servers",
    )
    max_sessions: PositiveInt = operational(
        256, "most sessions on one server; a pod's manifest must give it memory for this many"
    )
    session_ttl_s: PositiveFloat = operational(
        300.0, "seconds after which the server closes an idle session"
    )
    request_timeout_s: PositiveFloat = operational(
        30.0, "seconds that one request to a server may take"
    )
    start_timeout_s: PositiveFloat = operational(
        120.0, "seconds that a local server may take to start"
    )
    keep_s: PositiveFloat = operational(
        24 * 3600.0,
        "seconds after which a kept server ends. A fleet is removed by `agentgym envs gc` this"
        " long after its last use",
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
        """Return True if its servers' programs need not be installed on this machine."""
        return bool(self.endpoints) or self.deploy == "kubernetes"


class ChatConfig(Section):
    """Settings of the chat template that writes conversations."""

    history: Literal["exact", "append"] = setting(
        "exact",
        "exact: refuse a chat template that rewrites earlier turns; append: keep every turn as it"
        " was sampled, even if the template would rewrite it later",
    )
    thinking: Literal["auto", "on", "off"] = setting(
        "auto",
        "value of enable_thinking, for chat templates that have it; auto: the template's default",
    )


class ModelConfig(Section):
    source: Literal["tiny", "hub"] = setting(
        "tiny",
        "tiny: a small model and tokenizer made from the seed; hub: the pretrained model that"
        " model.name names",
    )
    name: str = setting(
        "", "source hub: repository or folder, for example Qwen/Qwen2.5-7B-Instruct"
    )
    revision: str | None = setting(
        None, "source hub: branch, tag or commit; null: the default branch"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "dtype of the weights and of computation; auto: the model's own (tiny: float32)",
    )
    chat: ChatConfig = ChatConfig()
    context_tokens: PositiveInt = setting(
        512, "most tokens of an episode, prompt and actions together"
    )
    vocab_size: PositiveInt = setting(512, "source tiny: most tokens of the tokenizer's vocabulary")
    hidden_size: PositiveInt = setting(96, "source tiny: hidden size")
    num_layers: PositiveInt = setting(2, "source tiny: transformer blocks")
    num_heads: PositiveInt = setting(3, "source tiny: attention heads")
    num_kv_heads: PositiveInt = setting(1, "source tiny: key and value heads")
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
    lr: PositiveFloat = setting(
        5e-4, "AdamW's learning rate after the warm-up; lower it if training is unstable"
    )
    warmup_steps: NonNegativeInt = setting(
        10, "optimizer steps in which the learning rate grows linearly from 0 to lr"
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "shape of the learning rate after the warm-up"
    )
    final_lr_fraction: float = setting(
        0.1, "learning rate of the last step as a fraction of lr (cosine, linear)", ge=0, le=1
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "AdamW's decay rates of the running averages of the gradient and of its square"
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay", ge=0)
    grad_clip: PositiveFloat = setting(
        0.3, "gradients with a larger global norm are scaled down to this norm"
    )


class WarmStartConfig(Section):
    enabled: bool = setting(
        True, "train on demonstrations first; turn it off to start from a pretrained model as it is"
    )
    source: Literal["expert", "trajectories"] = setting(
        "expert",
        "expert: demonstrations of the environment's expert; trajectories: those in"
        " data.trajectories, replayed, which dpo also takes its preferences from",
    )
    num_demos: PositiveInt = setting(300, "expert episodes to record, or trajectories to replay")
    steps: PositiveInt = setting(80, "optimizer steps on the demonstrations")
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
        "the optimizer of the warm start; training has its own",
    )


class RolloutConfig(Section):
    items_per_step: PositiveInt = setting(16, "items per optimizer step")
    group_size: PositiveInt = setting(8, "episodes sampled per item and optimizer step")
    temperature: PositiveFloat = setting(1.0, "sampling temperature in training")
    max_new_tokens: PositiveInt = setting(6, "most tokens of one action")
    observation_tokens: PositiveInt = setting(
        32,
        "expected tokens of one observation; used to check that the longest episode fits"
        " model.context_tokens",
    )
    instructions: bool = setting(False, "begin each episode with the environment's instructions")
    examples: NonNegativeInt = setting(0, "worked examples shown after the instructions")
    action_format: Literal["plain", "react"] = setting(
        "plain", 'plain: the whole reply is the action; react: the text after "Action:" is'
    )
    engine: str = setting(
        "torch",
        "engine that samples: torch, vllm, or an entry point of agentgym.engines in an installed"
        " package",
    )
    engine_threads: PositiveInt = operational(
        1,
        "most threads of the built-in engine on a CPU, up to one per core. More than 1 is faster"
        " for pretrained models; always 1 with deterministic and on Ray",
    )
    engine_python: str = operational(
        "",
        "Python interpreter for vLLM, for example .venv-vllm/bin/python; set it if vLLM is"
        " installed in another environment. Empty, and always in Ray's workers: this interpreter",
    )
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype in which vLLM computes; auto: the dtype of the learner's weights"
    )
    token_numbers_frac: float = setting(
        0.05,
        "share of the training episodes for which log-probabilities, entropies, advantages and"
        " ratios of every token are recorded",
        ge=0,
        le=1,
    )
    token_numbers_kib: NonNegativeInt = setting(
        64, "most KiB of these recorded numbers per optimizer step, before compression"
    )
    concurrency: PositiveInt = operational(
        256, "episodes that run at the same time; lower it if memory or servers run short"
    )
    publish_timeout_s: PositiveFloat = operational(
        120.0, "seconds for each of the two steps in which an engine takes new weights"
    )
    episode_timeout_s: PositiveFloat = setting(
        120.0,
        "seconds that the environment may take over a whole episode; a longer episode counts as"
        " failed",
    )
    max_attempts: PositiveInt = setting(3, "attempts at an episode if its environment fails")
    max_env_error_frac: float = setting(
        0.1, "share of failed episodes above which the run stops", ge=0, le=1
    )
    max_staleness: NonNegativeInt = setting(
        0,
        "how many updates old the weights may be that sampled a turn. With 0 rollouts and updates"
        " alternate; from 1 on, rollouts for this many later steps run during the update",
    )


class VllmConfig(Section):
    """Settings of vLLM, used if rollout.engine is vllm. Its dtype is rollout.engine_dtype, its
    longest sequence model.context_tokens.
    """

    tensor_parallel_size: PositiveInt = operational(
        1,
        "GPUs that share one engine, one process each; raise it if the model does not fit on one"
        " GPU",
    )
    memory_frac: float = operational(
        0.45, "share of a GPU's memory that the engine may use", gt=0, le=1
    )
    compile: bool = operational(
        True,
        "compile the model and capture CUDA graphs; ignored on the CPU, where compiling takes"
        " minutes",
    )
    cpu_cache_gib: PositiveInt = operational(1, "GiB for the key-value cache on the CPU")
    start_timeout_s: PositiveFloat = operational(600.0, "seconds that the engine may take to start")
    keep_s: PositiveFloat = operational(900.0, "seconds for which `make up` keeps an unused engine")


class HorizonConfig(Section):
    kind: Literal["fixed", "stepwise", "adaptive"] = setting(
        "stepwise",
        "fixed: one limit on turns; stepwise (ScalingInter): one stage per value of max_turns;"
        " adaptive: one stage that moves to the next value when success stops growing",
    )
    max_turns: tuple[PositiveInt, ...] = setting(
        (6, 9, 12),
        "most turns of an episode, one value per stage (adaptive: the values to move through)",
        min_length=1,
    )
    stage_steps: tuple[PositiveInt, ...] = setting((15, 15, 20), "optimizer steps per stage")
    window: PositiveInt = setting(
        5,
        "adaptive: optimizer steps whose mean success is compared with the same number before them",
    )
    min_gain: float = setting(
        0.02, "adaptive: move to the next value if success grew by less than this", ge=0
    )

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
    max_turns: PositiveInt = setting(12, "most turns of an episode, the same for every checkpoint")
    split: Literal["test", "validation"] = setting(
        "test", "items to evaluate on; use validation to choose settings, test for the final result"
    )
    num_items: PositiveInt = setting(512, "items of the split to evaluate on")
    num_samples: PositiveInt = setting(
        4, "sampled episodes per item, in addition to one greedy episode"
    )
    temperature: PositiveFloat = setting(1.0, "temperature of the sampled episodes")
    k: tuple[PositiveInt, ...] = setting(
        (1, 4), "values of k for pass@k; none may exceed num_samples", min_length=1
    )
    confidence: float = setting(0.95, "confidence level of all intervals", gt=0.5, lt=1)
    seed: Seed = setting(1, "seed of the sampled episodes")
    min_coverage: float = setting(
        0.95,
        "share of the episodes that must end without a failure; below it the evaluation has no"
        " result",
        ge=0,
        le=1,
    )
    chunk_items: PositiveInt = operational(
        256, "items per commit; a killed evaluation repeats at most this many"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if max(self.k) > self.num_samples:
            raise ValueError(
                f"evaluation.k {list(self.k)} needs num_samples >= {max(self.k)}, got"
                f" {self.num_samples}; pass@k is undefined for n < k"
            )
        return self


class ValidationConfig(Section):
    """Evaluation on validation items during training; never used to update weights."""

    every: NonNegativeInt = setting(5, "optimizer steps between two validations; 0: never")
    num_items: PositiveInt = setting(64, "validation items, one sample each")
    max_turns: PositiveInt = setting(12, "most turns of a validation episode")
    temperature: PositiveFloat = setting(1.0, "sampling temperature of validation")


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
    )
    alias: str = setting(
        "champion",
        "alias that marks the accepted model and that the gate moves: letters, digits, _ and -",
        pattern=r"^[\w-]+$",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse `latest` and v1, v2, ..., which MLflow reserves."""
        if self.alias == "latest" or re.fullmatch(r"[vV]\d+", self.alias):
            raise ValueError(
                f"registry.alias {self.alias!r} has a meaning of its own in MLflow; name another"
                " one, for example champion"
            )
        return self


class TrackingConfig(Section):
    uri: str = operational(
        "", "address of the MLflow server; empty: an SQLite file next to the store"
    )
    experiment: str = operational(
        "", "name of MLflow's experiment; empty: agentgym- and the names of the environments"
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

    context: str = operational("", "context of the kubeconfig; empty: its current context")
    namespace: str = operational(
        "agentgym-fleets",
        "namespace of fleets and RayJobs; k8s/base prepares it",
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    )
    overlay: str = operational(
        "kind", "folder of k8s/overlays that describes the servers", pattern="^[a-z0-9-]+$"
    )
    components: tuple[Annotated[str, Field(pattern="^[a-z0-9-]+(/[a-z0-9-]+)*$")], ...] = (
        operational((), "folders of k8s/components to add to the overlay, for example autoscale")
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
        " cluster, http://host:8265",
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
    node_labels: dict[str, str] = operational({}, "labels that a node must have to run workers")
    queue: str = operational(
        "",
        "LocalQueue of Kueue that admits the whole job at once; empty: no Kueue",
        pattern="^[a-z0-9.-]*$",
    )
    priority: str = operational(
        "", "WorkloadPriorityClass of Kueue; empty: the queue's default", pattern="^[a-z0-9.-]*$"
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
