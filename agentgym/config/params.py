"""The whole of params.yaml, and the constraints between its sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveFloat, SerializeAsAny

from agentgym.algorithms.recipe import recipe_of
from agentgym.config.algorithm import AlgorithmConfig, algorithm_config
from agentgym.config.operation import (
    AlarmsConfig,
    GateConfig,
    KubeRayConfig,
    KubernetesConfig,
    PipelineConfig,
    RayConfig,
    RegistryConfig,
    StoreConfig,
    TrackingConfig,
)
from agentgym.config.optimization import LearnerConfig, LoraConfig, OptimizerConfig
from agentgym.config.section import Section, Seed, operational, setting
from agentgym.config.sections import (
    DataConfig,
    EnvConfig,
    EvaluationConfig,
    HorizonConfig,
    ModelConfig,
    RolloutConfig,
    ValidationConfig,
    VllmConfig,
    WarmStartConfig,
)
from agentgym.trust import is_here


def _of_recipe(value: Any) -> Any:
    """Turn a mapping into the settings of the recipe it names; return other values unchanged."""
    return algorithm_config(**value) if isinstance(value, dict) else value


class RunConfig(Section):
    """The whole configuration of a run."""

    seed: Seed = setting(0, "seed of every random draw")
    deterministic: bool = setting(
        False, "one thread, fixed slots: a killed and resumed run ends bit-identical"
    )
    compute_device: Literal["cpu", "cuda"] = setting(
        "cpu", "where models and batches are, in every back end; deterministic needs the CPU"
    )
    compute_peak_tflops: PositiveFloat | None = operational(
        None,
        "dense bfloat16 TFLOP/s of one device, which model FLOPs utilization (perf/mfu) is a share"
        " of; null: derived from the device's name, nothing on a CPU",
        examples=[989.0],
    )
    compute: Literal["inline", "ray", "ray-job", "kuberay"] = operational(
        "inline",
        "where steps compute: this process, Ray actors, jobs on a Ray cluster, jobs of KubeRay",
    )
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    mix: tuple[EnvConfig, ...] = setting(
        (), "further environments of the same run", examples=[[{"name": "textcraft"}]]
    )
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(_of_recipe)] = (
        algorithm_config()
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    learner: LearnerConfig = LearnerConfig()
    horizon: HorizonConfig = HorizonConfig()
    validation: ValidationConfig = ValidationConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    pipeline: PipelineConfig = PipelineConfig()
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    store: StoreConfig = StoreConfig()
    ray: RayConfig = RayConfig()
    kuberay: KubeRayConfig = KubeRayConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    def problems(self) -> Iterator[str]:
        yield from self._device_problems()
        yield from self._recipe_problems()
        yield from self._context_problems()
        yield from self._environments_problems()
        yield from self._compute_problems()

    def _device_problems(self) -> Iterator[str]:
        if self.deterministic and self.compute_device != "cpu":
            yield (
                f"deterministic is promised on the CPU alone, and compute_device is"
                f" {self.compute_device}; set one of the two otherwise"
            )
        if self.deterministic and self.rollout.engine == "vllm":
            yield (
                "deterministic is nothing vLLM can keep: its sums depend on what else is in the"
                " batch, and so on which episode is faster; use rollout.engine torch with"
                " deterministic"
            )
        if self.learner.offload_optimizer and self.compute_device == "cpu":
            yield (
                "learner.offload_optimizer with compute_device cpu: host memory is where the"
                " optimizer's state is already; leave it out, or use compute_device cuda"
            )
        if self.rollout.engine_dtype != "auto" and self.rollout.engine == "torch":
            yield (
                f"rollout.engine_dtype {self.rollout.engine_dtype}: the built-in engine computes in"
                " the weights' own; use auto, or rollout.engine vllm"
            )
        for name in ("worker", "rank"):
            gpus = getattr(self.ray, f"{name}_gpus")
            if self.compute == "ray" and (self.compute_device == "cuda") != bool(gpus):
                yield (
                    f"compute_device {self.compute_device} with ray.{name}_gpus {gpus:g}; with cuda"
                    " every worker and rank needs a share of a GPU, with cpu it would hold one and"
                    " not use it"
                )
            if self.ray.transport == "broadcast" and gpus % 1:
                yield (
                    f"ray.transport broadcast with ray.{name}_gpus {gpus:g}: NCCL refuses two"
                    " processes on one GPU; use whole ones, or ray.transport object_store"
                )

    def _recipe_problems(self) -> Iterator[str]:
        name, recipe = self.algorithm.recipe, recipe_of(self.algorithm.recipe)
        if recipe.needs_groups and self.rollout.group_size < 2:
            yield (
                f"rollout.group_size {self.rollout.group_size} leaves {name}"
                " nothing to compare; use at least 2, or a recipe without groups"
            )
        if self.warm_start.source == "trajectories" and not self.warm_start.enabled:
            yield (
                "warm_start.source trajectories with warm_start.enabled false reads none; enable"
                " it, or use source expert"
            )
        if self.algorithm.loop.imitates and not self.warm_start.enabled:
            yield (
                f"recipe {name} learns from demonstrations, and warm_start.enabled false makes"
                " none; enable it, or use dpo"
            )
        if not self.algorithm.loop.samples_every_step and self.horizon.kind == "adaptive":
            yield (
                f"horizon.kind adaptive follows success step by step, which recipe {name} does not"
                " sample; use stepwise"
            )
        if not self.algorithm.loop.samples_every_step and self.rollout.max_staleness:
            yield (
                f"rollout.max_staleness {self.rollout.max_staleness} means nothing to recipe"
                f" {name}; leave it out, or use a recipe of reinforcement learning"
            )
        correction, share = getattr(self.algorithm, "correction", "none"), "rollout.engine_logprobs"
        if self.rollout.engine_logprobs < 1 and correction != "none":
            yield (
                f"{share} {self.rollout.engine_logprobs:g} with algorithm.correction {correction}:"
                f" it corrects by the engine's log-probability of each token; use {share} 1, or"
                " correction none"
            )
        if self.rollout.max_staleness and correction == "none":
            yield (
                f"rollout.max_staleness {self.rollout.max_staleness} samples with older weights,"
                " for which algorithm.correction none does not correct; use token_truncate"
            )
        if self.deterministic and self.rollout.max_staleness:
            yield (
                f"rollout.max_staleness {self.rollout.max_staleness} overlaps rollouts with the"
                " update, which no run repeats; use 0 with deterministic"
            )

    def _context_problems(self) -> Iterator[str]:
        turn_limits = [*self.horizon.max_turns, self.evaluation.max_turns]
        if self.validation.every:
            turn_limits.append(self.validation.max_turns)
        longest = max(turn_limits)
        needed = longest * (self.rollout.max_new_tokens + self.rollout.observation_tokens)
        if needed > self.model.context_tokens:
            yield (
                f"model.context_tokens {self.model.context_tokens} is too small for {longest} turns"
                f" of rollout.max_new_tokens {self.rollout.max_new_tokens} + observation_tokens"
                f" {self.rollout.observation_tokens} = {needed}; raise it or shorten the horizon"
            )
        if self.rollout.examples and not self.rollout.instructions:
            yield (
                f"rollout.examples {self.rollout.examples} follow the instructions; set"
                " rollout.instructions true, or examples 0"
            )

    def _environments_problems(self) -> Iterator[str]:
        for env in self.envs:
            if env.dialect != "native" and not env.endpoints:
                yield (
                    f"env.dialect {env.dialect} of {env.name} needs env.endpoints: such servers are"
                    " not started here"
                )
            if env.dialect != "native" and self.rollout.instructions:
                yield (
                    "rollout.instructions begins with a server's instructions, and one of dialect"
                    f" {env.dialect} ({env.name}) has none"
                )
        names = [env.name for env in self.envs]
        if len(set(names)) < len(names):
            yield (
                f"mix: the environments of a run must have different names, got {', '.join(names)};"
                " remove one"
            )
        for env in self.envs:
            of_pods = env.deploy == "kubernetes"
            room = env.max_sessions * max(1, len(env.endpoints))
            if not of_pods and self.rollout.concurrency > room:
                yield (
                    f"rollout.concurrency {self.rollout.concurrency} is above env.max_sessions"
                    f" {env.max_sessions} ({env.name}); lower it or raise the other"
                )

    def _compute_problems(self) -> Iterator[str]:
        for name in ("worker", "rank"):
            if not getattr(self.ray, f"{name}_cpus") + getattr(self.ray, f"{name}_gpus"):
                yield (
                    f"ray.{name}_cpus and ray.{name}_gpus are both 0; Ray places only what takes"
                    " room, a fraction is enough"
                )
        num_gpus = self.vllm.tensor_parallel_size
        is_vllm_on_gpus = self.rollout.engine == "vllm" and self.compute_device == "cuda"
        if self.compute == "ray" and is_vllm_on_gpus and num_gpus > max(1, self.ray.worker_gpus):
            yield (
                f"vllm.tensor_parallel_size {num_gpus} with ray.worker_gpus"
                f" {self.ray.worker_gpus:g}: an engine's processes run in its worker, each on a GPU"
                f" of its own; set ray.worker_gpus {num_gpus}"
            )
        is_http = self.ray.address.startswith(("http://", "https://"))
        if self.compute == "ray" and self.deterministic:
            yield (
                "compute ray plays episodes in several processes, which no run repeats to the bit;"
                " use inline with deterministic"
            )
        if self.compute == "ray-job" and not is_http:
            yield (
                f"ray.address {self.ray.address!r} must be a cluster's dashboard for compute"
                " ray-job, e.g. http://127.0.0.1:8265"
            )
        if self.compute == "ray" and is_http:
            yield (
                f"ray.address {self.ray.address} is a dashboard; compute ray joins host:port or"
                " auto, compute ray-job takes URLs"
            )
        # a pod must have room for the workers and ranks that Ray places there
        for name in ("worker", "rank") if self.compute == "kuberay" else ():
            for kind, limit in (("cpus", "worker_cpus"), ("gpus", "worker_gpus")):
                request, room = getattr(self.ray, f"{name}_{kind}"), getattr(self.kuberay, limit)
                if request > room:
                    yield (
                        f"ray.{name}_{kind} {request:g} is more than kuberay.{limit} {room}: no pod"
                        " has room for it; raise the one or lower the other"
                    )

    @property
    def adapts_warm_start(self) -> bool:
        """True if the warm start trains an adapter: with `lora.rank` > 0 and a pretrained model. On
        random weights it trains all weights.
        """
        return self.model.source == "hub" and self.lora.rank > 0

    @property
    def learner_settings(self) -> LearnerConfig:
        """The learner's settings as this run applies them.
        A deterministic run computes every sequence whole and in one thread, because sums depend on
        both. The update uses one thread if rollouts run at the same time or on Ray.
        """
        alone = self._may_thread and not self.rollout.max_staleness
        changes = {
            "share_prefixes": self.learner.share_prefixes and not self.deterministic,
            "threads": self.learner.threads if alone else 1,
        }
        return self.learner.model_copy(update=changes)

    @property
    def engine_threads(self) -> int:
        """Threads of the built-in engine; one in a deterministic run and on Ray."""
        return self.rollout.engine_threads if self._may_thread else 1

    @property
    def _may_thread(self) -> bool:
        return self.compute == "inline" and not self.deterministic

    @property
    def data_folders(self) -> dict[str, Path]:
        """Folders of data this run reads, by the setting that names them."""
        folders = {"data.path": self.data.path}
        if self.warm_start.source == "trajectories":
            folders["data.trajectories"] = self.data.trajectories
        return folders

    @property
    def envs(self) -> tuple[EnvConfig, ...]:
        """Every environment of the run."""
        return (self.env, *self.mix)

    @property
    def env_weights(self) -> dict[str, float]:
        """Share of the items, by environment; they need not sum to 1."""
        return {env.name: env.weight for env in self.envs}

    @property
    def env_names(self) -> str:
        """Names of the environments for people: `babyai`, or `babyai + textcraft`."""
        return " + ".join(env.name for env in self.envs)

    @property
    def state_dir(self) -> Path:
        """Folder of all local state: the parent of `store.path`."""
        return self.store.path.parent

    @property
    def experiment(self) -> str:
        """Name of MLflow's experiment; if none was set, derived from the environments."""
        return self.tracking.experiment or self._rule_name

    @property
    def registered_model(self) -> str:
        """Name of the registered model; if none was set, derived from the environments."""
        return self.registry.model_name or self._rule_name

    @property
    def _rule_name(self) -> str:
        """Default name of experiment and registered model, derived from the environments."""
        return "-".join(["agentgym", *(env.name for env in self.envs)])

    def semantic(self) -> dict[str, Any]:
        """Return the fields that change a result, with the registered model's resolved name."""
        tree = super().semantic()
        tree["registry"]["model_name"] = self.registered_model
        return tree

    @property
    def tracking_uri(self) -> str:
        """URI of MLflow's store: `tracking.uri`, else an SQLite file in `state_dir` by its absolute
        path, because MLflow keeps artifact paths as given.
        """
        return self.tracking.uri or f"sqlite:///{(self.state_dir / 'mlflow.db').resolve()}"


def is_elsewhere(cfg: RunConfig) -> bool:
    """Return True if steps compute on machines that do not have this machine's paths: with compute
    kuberay, and with ray-job on another machine without `ray.shared_paths`.
    """
    if cfg.compute == "kuberay":
        return True
    return cfg.compute == "ray-job" and not (cfg.ray.shared_paths or is_here(cfg.ray.address))


def refused_elsewhere(cfg: RunConfig) -> str | None:
    """Return the error text for settings that steps on other machines cannot use or that are unsafe
    there, with a remedy for each; None without any, or if steps run on this machine.
    """
    if not is_elsewhere(cfg):
        return None
    problems = []
    if not cfg.store.uri:
        problems.append("store.uri '': name s3://bucket/prefix")
    uri = cfg.tracking.uri
    if not uri.startswith(("http://", "https://")) or is_here(uri):
        problems.append(f"tracking.uri {uri!r}: name an MLflow server that other machines reach")
    if "@" in uri:
        problems.append("tracking.uri with a password: it belongs into a secret")
    for env in cfg.envs:
        problems += [
            f"env.endpoints {url} ({env.name}): name servers that other machines reach"
            for url in env.endpoints
            if is_here(url)
        ]
    name = cfg.model.name
    if cfg.model.source == "hub" and (Path(name).is_dir() or name.startswith(("/", ".", "~"))):
        problems.append(f"model.name {name}: name a repository of the Hub")
    if not problems:
        return None
    is_job = cfg.compute == "ray-job"
    shared = "; where the cluster has the same paths, set ray.shared_paths" if is_job else ""
    return (
        f"compute {cfg.compute} sends steps to other machines, where this would be local:"
        f" {'; '.join(problems)}{shared}"
    )
