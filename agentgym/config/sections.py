"""The sections of params.yaml about items, model, rollouts and evaluation."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from agentgym.config.optimization import OptimizerConfig
from agentgym.config.section import ConfigError, Section, Seed, operational, setting
from agentgym.trust import outward, unowned


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
        examples=["e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"],
    )
    validation_fraction: float = setting(
        0.1, "share of the training items that is set aside for validation", gt=0, lt=0.5
    )


class EnvConfig(Section):
    name: str = setting("babyai", "name of the environment", pattern="^[a-z0-9-]+$")
    options: dict[str, Any] = setting(
        {},
        "options of the environment, see its README; those left out have its defaults",
        examples=[{"levels": ["GoToObj"]}],
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
        "auto", "servers to start on Kubernetes; auto: enough for rollout.concurrency episodes"
    )
    keep: bool = operational(
        False, "leave its servers running for later runs with the same options; envs-down ends them"
    )
    endpoints: tuple[str, ...] = operational(
        (),
        "URLs of running servers; a host name stands for all its addresses. Empty: the run starts"
        " the servers",
        examples=[["http://10.0.0.5:8000"]],
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

    def problems(self) -> Iterator[str]:
        if self.deploy == "kubernetes" and self.endpoints:
            yield (
                f"env.endpoints of {self.name} names running servers, and env.deploy kubernetes"
                " starts some; leave one of them out"
            )
        if self.deploy == "local" and self.replicas != "auto":
            yield (
                f"env.replicas {self.replicas} of {self.name} with env.deploy local: one process"
                " serves all sessions of this machine; leave it out, or use deploy kubernetes"
            )
        if self.endpoints and self.keep:
            yield (
                f"env.keep of {self.name} with env.endpoints: servers that were started elsewhere"
                " outlive every run; leave it out"
            )

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
        "", "source hub: repository or folder", examples=["Qwen/Qwen2.5-7B-Instruct"]
    )
    revision: str | None = setting(
        None, "source hub: branch, tag or commit; null: the default branch", examples=["main"]
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "dtype of the weights and of computation; auto: the model's own (tiny: float32)"
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

    def problems(self) -> Iterator[str]:
        if self.source == "hub" and not self.name:
            yield (
                "model.name is empty; with source hub name a repository or folder, e.g."
                " Qwen/Qwen2.5-7B-Instruct"
            )
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads < 32:
            yield (
                f"model.hidden_size {self.hidden_size} / num_heads {self.num_heads} must be a whole"
                " head dimension >= 32 (vLLM)"
            )
        if self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_heads {self.num_heads} must be a multiple of num_kv_heads"
                f" {self.num_kv_heads}"
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

    @field_validator("optimizer", mode="before")
    @classmethod
    def _with_defaults(cls, value: Any) -> Any:
        """Fill up a mapping with the defaults of the warm start, which are not training's."""
        usual = cls.model_fields["optimizer"].default.model_dump()
        return {**usual, **value} if isinstance(value, dict) else value


class RolloutConfig(Section):
    items_per_step: PositiveInt = setting(16, "items per optimizer step")
    group_size: PositiveInt = setting(8, "episodes per item and optimizer step")
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
        "Python interpreter for vLLM; set it if vLLM is installed in another environment. Empty,"
        " and always in Ray's workers: this interpreter",
        examples=[".venv-vllm/bin/python"],
    )
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype in which vLLM computes; auto: the dtype of the learner's weights"
    )
    engine_logprobs: float = setting(
        1.0,
        "share of the actions whose log-probabilities the engine gives: they cost vLLM speed. Below"
        " 1 needs algorithm.correction none; mismatch and audit speak for this share alone",
        gt=0,
        le=1,
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
        "most turns per episode in each stage (adaptive: the values to move through)",
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

    def problems(self) -> Iterator[str]:
        if self.kind == "fixed" and len(self.max_turns) != 1:
            yield (
                f"horizon.max_turns {list(self.max_turns)} has {len(self.max_turns)} values; a"
                " fixed horizon takes one"
            )
        if self.kind == "adaptive":
            if list(self.max_turns) != sorted(set(self.max_turns)):
                yield (
                    f"horizon.max_turns {list(self.max_turns)} of an adaptive horizon must grow"
                    " from value to value"
                )
            if len(self.stage_steps) != 1:
                yield (
                    f"horizon.stage_steps {list(self.stage_steps)} has {len(self.stage_steps)}"
                    " values; an adaptive horizon is one stage"
                )
            return
        if list(self.max_turns) != sorted(self.max_turns):
            yield (
                f"horizon.max_turns {list(self.max_turns)} must not decrease; sort it or use a"
                " fixed horizon"
            )
        if len(self.stage_steps) != len(self.max_turns):
            yield (
                f"horizon.stage_steps {list(self.stage_steps)} has {len(self.stage_steps)} values"
                f" for {len(self.max_turns)} stages; give one number of steps per value of"
                " horizon.max_turns"
            )


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

    def problems(self) -> Iterator[str]:
        if max(self.k) > self.num_samples:
            yield (
                f"evaluation.k {list(self.k)} needs num_samples >= {max(self.k)}, got"
                f" {self.num_samples}; pass@k is undefined for n < k"
            )


class ValidationConfig(Section):
    """Evaluation on validation items during training; never used to update weights."""

    every: NonNegativeInt = setting(5, "optimizer steps between two validations; 0: never")
    num_items: PositiveInt = setting(64, "validation items, one sample each")
    max_turns: PositiveInt = setting(12, "most turns of a validation episode")
    temperature: PositiveFloat = setting(1.0, "sampling temperature of validation")


def owned_env(env: EnvConfig, owner_envs: Sequence[EnvConfig]) -> EnvConfig:
    """Return an environment from a stored record, with settings safe to start it here.

    Options, dialect and weight are the record's. Servers and limits are those of the environment in
    the owner's configuration that has the same name, options and dialect, else the defaults.
    owner_envs: the environments of the owner's configuration.
    Errors: ConfigError if an option names an address, a path or a variable that the owner's
    configuration does not have.
    """
    same_name = [owned for owned in owner_envs if owned.name == env.name]
    refused = unowned(env.name, env.options, [owned.options for owned in same_name])
    if refused:
        override = shlex.quote(f"env={json.dumps({'name': env.name, 'options': env.options})}")
        raise ConfigError(
            f"{env.name} as on record would use {asked_of(env)}, which your configuration does not"
            f" name; if you trust that, add --set {override}"
        )
    asked = env.options, env.dialect
    same = [owned for owned in same_name if (owned.options, owned.dialect) == asked]
    base = same[0] if same else EnvConfig(name=env.name)
    settings = {"options": env.options, "dialect": env.dialect, "weight": env.weight}
    return base.model_copy(update=settings)


def asked_of(env: EnvConfig) -> str:
    """Return an environment's options that name an address, path or variable, with values."""
    values = outward(env.name, env.options)
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items())
