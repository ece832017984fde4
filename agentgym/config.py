"""params.yaml as one frozen, validated tree.
A number that changes a result is written there and nowhere else.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from agentgym.algorithms.recipe import RECIPES, Aggregation, KlEstimator, KlPlace, Loop, Truncated
from agentgym.trust import untrusted_address

MAX_VALUES = 100_000  # of one parameter file


class ConfigError(ValueError):
    """One line that says what was expected, what came and what to do.
    Exit code 2; nothing was started.
    """


def _setting(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes results: it is part of the keys."""
    return Field(default=default, description=description, **constraints)


def _operational(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes where or how fast work is done, never its result: it stays out of
    every key.
    """
    return Field(
        default=default,
        description=description,
        json_schema_extra={"operational": True},
        **constraints,
    )


def _is_operational(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and bool(
        info.json_schema_extra.get("operational")
    )


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """The fields that change a result, as plain JSON types."""
        result: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if _is_operational(info):
                continue
            value = getattr(self, name)
            if isinstance(value, tuple) and value and isinstance(value[0], Section):
                result[name] = [each.semantic() for each in value]
            else:
                result[name] = (
                    value.semantic()
                    if isinstance(value, Section)
                    else json.loads(json.dumps(value))
                )
        return result


class DataConfig(Section):
    path: Path = _operational(
        Path("data/AgentGym-RL-Data-ID"),
        "folder of the item lists; their digest is in the keys, not their place",
    )
    trajectories: Path = _operational(
        Path("data/trajectories/imported"),
        "folder of others' trajectories, read where warm_start.source says so",
    )
    validation_fraction: float = _setting(
        0.1, "share of the train items kept for validation", gt=0, lt=0.5
    )


class EnvConfig(Section):
    name: str = _setting("babyai", "the environment's name", pattern="^[a-z0-9-]+$")
    options: dict[str, Any] = _setting(
        {}, "handed to the environment; what is left out is its own default"
    )
    weight: PositiveFloat = _setting(
        1.0, "share of the items, against the other environments of the run"
    )
    endpoints: tuple[str, ...] = _operational(
        (), "running servers; a host name stands for all its addresses; empty: one local process"
    )
    dialect: Literal["native", "agentgym", "openenv"] = _setting(
        "native",
        "what the endpoints speak: agentgym, AgentGym's own servers; openenv, OpenEnv's contract",
    )
    max_sessions: PositiveInt = _operational(256, "sessions of one server")
    session_ttl_s: PositiveFloat = _operational(
        300.0, "seconds after which an idle session is closed"
    )
    request_timeout_s: PositiveFloat = _operational(30.0, "seconds for one request to a server")
    start_timeout_s: PositiveFloat = _operational(120.0, "seconds until a local server is ready")


class ModelConfig(Section):
    source: Literal["tiny", "hub"] = _setting(
        "tiny", "tiny: from a seed, with its own tokenizer; hub: name a pretrained model"
    )
    name: str = _setting(
        "", "source hub: repository or folder, for example Qwen/Qwen2.5-7B-Instruct"
    )
    revision: str | None = _setting(None, "source hub: branch, tag or commit")
    context_tokens: PositiveInt = _setting(512, "tokens of the longest episode")
    vocab_size: PositiveInt = _setting(512, "source tiny: upper bound for the trained tokenizer")
    hidden_size: PositiveInt = _setting(96, "source tiny: width")
    num_layers: PositiveInt = _setting(2, "source tiny: layers")
    num_heads: PositiveInt = _setting(3, "source tiny: attention heads")
    num_kv_heads: PositiveInt = _setting(1, "source tiny: heads of keys and values")
    mlp_size: PositiveInt = _setting(288, "source tiny: width of the feed-forward layers")

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
    lr: PositiveFloat = _setting(5e-4, "learning rate of AdamW after the warm-up")
    warmup_steps: NonNegativeInt = _setting(10, "optimizer steps over which the rate grows from 0")
    schedule: Literal["constant", "cosine", "linear"] = _setting(
        "constant", "course of the learning rate after the warm-up"
    )
    final_lr_fraction: float = _setting(
        0.1, "share of lr that is left at the last step (cosine, linear)", ge=0, le=1
    )
    betas: tuple[float, float] = _setting(
        (0.9, 0.99), "AdamW's: what a step keeps of the average gradient, and of its square"
    )
    weight_decay: float = _setting(0.0, "weight decay of AdamW", ge=0)
    grad_clip: PositiveFloat = _setting(0.3, "largest global norm of a gradient")


class WarmStartConfig(Section):
    enabled: bool = _setting(
        True, "off: training starts from the model as it comes (real pretrained models)"
    )
    source: Literal["expert", "trajectories"] = _setting(
        "expert",
        "expert: the environment's own; trajectories: those in data.trajectories, played again,"
        " among which dpo prefers, too",
    )
    num_demos: PositiveInt = _setting(300, "expert episodes, or trajectories")
    steps: PositiveInt = _setting(80, "optimizer steps on demonstrations")
    batch_size: PositiveInt = _setting(32, "demonstrations per optimizer step")
    optimizer: OptimizerConfig = _setting(
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
    items_per_step: PositiveInt = _setting(16, "items of one optimizer step")
    group_size: PositiveInt = _setting(8, "episodes sampled of each item")
    temperature: PositiveFloat = _setting(1.0, "temperature of sampling while training")
    max_new_tokens: PositiveInt = _setting(6, "tokens of one action, at most")
    observation_tokens: PositiveInt = _setting(
        32, "tokens of one observation; to check that the horizon fits the context"
    )
    instructions: bool = _setting(False, "episodes begin with the environment's instructions")
    action_format: Literal["plain", "react"] = _setting(
        "plain", 'plain: the reply is the action; react: the text after "Action:"'
    )
    engine: str = _setting(
        "torch",
        "what samples: torch, or one that an installed package offers as an entry point of"
        " agentgym.engines",
    )
    concurrency: PositiveInt = _operational(256, "episodes in flight")
    episode_timeout_s: PositiveFloat = _setting(
        120.0, "seconds; a longer episode has failed, like one whose environment fails"
    )
    max_attempts: PositiveInt = _setting(3, "attempts at an episode whose environment fails")
    max_env_error_frac: float = _setting(
        0.1, "share of failed episodes above which the run stops", ge=0, le=1
    )
    max_staleness: int = _setting(
        0, "updates the sampling weights may lag; 1: rollouts overlap the update", ge=0, le=1
    )


class AlgorithmConfig(Section):
    recipe: str = _setting("grpo", "algorithm: a row of agentgym/algorithms/recipe.py")
    truncated: Truncated | None = _setting(
        None,
        "what a cut episode counts as; None: the recipe's own; bootstrap needs a critic",
    )
    aggregation: Aggregation | None = _setting(
        None, "how token losses become one; None: the recipe's own"
    )
    constant_length: PositiveInt | None = _setting(
        None, "aggregation constant: action tokens; None: of the longest possible episode"
    )
    clip_low: PositiveFloat = _setting(
        0.2, "the ratio of new to old probability is clipped at 1 minus this"
    )
    clip_high: PositiveFloat = _setting(
        0.28, "the ratio of new to old probability is clipped at 1 plus this"
    )
    dual_clip: float = _setting(
        3.0, "recipes with a dual clip: largest loss per unit of negative advantage", gt=1
    )
    gamma: float = _setting(1.0, "discount per action token", gt=0, le=1)
    gae_lambda: float = _setting(
        1.0, "lambda of generalized advantage estimation, per action token", ge=0, le=1
    )
    critic_lr: PositiveFloat = _setting(1e-3, "learning rate of the critic")
    critic_warmup_steps: NonNegativeInt = _setting(
        5, "optimizer steps in which the critic alone learns"
    )
    value_clip: PositiveFloat = _setting(
        0.2, "a value may move by so much in one step before its loss is clipped"
    )
    kl_coef: float = _setting(
        0.0,
        "weight of the KL penalty against the model training began with; 0: no such model",
        ge=0,
    )
    kl_estimator: KlEstimator | None = _setting(
        None, "estimator of the KL penalty; None: the recipe's own"
    )
    kl_place: KlPlace | None = _setting(
        None, "whether the KL penalty is in the loss or in the reward; None: the recipe's own"
    )
    entropy_coef: float = _setting(0.0, "weight of the entropy bonus", ge=0)
    max_refills: NonNegativeInt = _setting(
        3, "dynamic sampling: rounds of further items in place of groups with equal rewards"
    )
    overlong_buffer: float = _setting(
        0.2, "share of the budget, its last, in which the overlong penalty grows", gt=0, le=1
    )
    overlong_penalty: PositiveFloat = _setting(
        1.0, "reward that an episode at the end of the budget loses"
    )
    shuffle_rewards: bool = _setting(
        False, "a control: outcomes are dealt to episodes at random, nothing can be learned"
    )
    epochs: PositiveInt = _setting(1, "passes over one batch")
    minibatches: PositiveInt = _setting(2, "optimizer updates per pass")
    importance_cap: PositiveFloat = _setting(
        2.0, "largest importance weight of learner against engine"
    )
    max_mismatch_kl: PositiveFloat | None = _setting(
        None,
        "nats per token between engine and learner, above which the run stops; None: what the"
        " engine states for the dtype of the weights",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        recipe = RECIPES.get(self.recipe)
        if recipe is None:
            return self  # the whole configuration says so
        place, estimator = (
            self.kl_place or recipe.kl_place,
            self.kl_estimator or recipe.kl_estimator,
        )
        if place == "loss" and estimator == "k1":
            raise ValueError(
                f"algorithm.kl_estimator k1 with kl_place loss (recipe {self.recipe}) has no"
                " expected gradient and holds the policy to nothing; use kl_estimator k2 or k3, or"
                " kl_place reward"
            )
        if place == "reward" and recipe.standardises_groups:
            raise ValueError(
                f"algorithm.kl_place reward with recipe {self.recipe}, which divides by the"
                " deviation of each group: in a group of equal outcomes the noise of the KL"
                " becomes advantages of +-1; use kl_place loss, or a recipe that does not divide"
                " (rloo)"
            )
        return self


class HorizonConfig(Section):
    kind: Literal["fixed", "stepwise", "adaptive"] = _setting(
        "stepwise",
        "stepwise is ScalingInter: one stage per value of max_turns; adaptive: one stage, the next"
        " value when success stops growing",
    )
    max_turns: tuple[PositiveInt, ...] = _setting(
        (6, 9, 12), "turns an episode may have, by stage", min_length=1
    )
    stage_steps: tuple[PositiveInt, ...] = _setting((15, 15, 20), "optimizer steps per stage")
    window: PositiveInt = _setting(
        5, "adaptive: optimizer steps whose mean success is compared with that of as many before"
    )
    min_gain: float = _setting(0.02, "adaptive: a smaller gain ends the present horizon", ge=0)

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


class OfflineConfig(Section):
    """What the recipes dpo and agent_evol learn from in one stage."""

    num_items: PositiveInt = _setting(
        128, "train items sampled at the start of a stage, rollout.group_size times each"
    )
    per_item: PositiveInt = _setting(4, "most pairs (dpo) or successes (agent_evol) of one item")
    pairs_per_step: PositiveInt = _setting(32, "dpo: pairs of one optimizer step")
    dpo_lr: PositiveFloat = _setting(
        1e-4,
        "dpo: in place of optimizer.lr; at rates of the other recipes both sides of a pair soon"
        " lose all likelihood",
    )
    beta: PositiveFloat = _setting(
        0.5, "dpo: how strongly the policy is held to the one the stage began with"
    )
    label_smoothing: float = _setting(
        0.0, "dpo: assumed share of pairs that are the wrong way round", ge=0, lt=0.5
    )
    chunk_items: PositiveInt = _operational(64, "items committed at a time")


class EvaluationConfig(Section):
    max_turns: PositiveInt = _setting(
        12, "turns an episode may have, the same for every checkpoint"
    )
    split: Literal["test", "validation"] = _setting(
        "test", "items to evaluate on; validation: to choose settings by"
    )
    num_items: PositiveInt = _setting(512, "items of the split")
    num_samples: PositiveInt = _setting(4, "samples of each item, beside one greedy episode")
    temperature: PositiveFloat = _setting(1.0, "temperature of the samples")
    k: tuple[PositiveInt, ...] = _setting((1, 4), "each k of pass@k", min_length=1)
    confidence: float = _setting(0.95, "level of every interval", gt=0.5, lt=1)
    num_bootstrap: PositiveInt = _setting(2000, "draws of a bootstrap interval")
    seed: NonNegativeInt = _setting(1, "seed of the samples and of the bootstrap")
    min_coverage: float = _setting(
        0.95,
        "share of episodes that must count, not failed; below it there is no result",
        ge=0,
        le=1,
    )
    chunk_items: PositiveInt = _operational(256, "items committed at a time")

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

    every: NonNegativeInt = _setting(5, "optimizer steps; 0: never")
    num_items: PositiveInt = _setting(64, "validation items, one sample each")
    max_turns: PositiveInt = _setting(12, "turns an episode of validation may have")
    temperature: PositiveFloat = _setting(1.0, "temperature of sampling")


class RegistryConfig(Section):
    model_name: str = _setting("agentgym-babyai", "name in the registry", pattern=r"^[\w .-]+$")
    alias: str = _setting("champion", "alias that moves to a new version which is not worse")


class TrackingConfig(Section):
    uri: str = _operational("", "MLflow's; empty: SQLite beside the store")
    experiment: str = _operational("agentgym-babyai", "MLflow's experiment")


class StoreConfig(Section):
    path: Path = _operational(
        Path(".agentgym/store"), "folder of all results; logs and other local state lie beside it"
    )
    uri: str = _operational(
        "",
        "s3://bucket/prefix; empty: the folder `path`",
        pattern=r"^$|^s3://[a-z0-9][a-z0-9.-]+(/[\w.-]+)*$",
    )
    keep_checkpoints: PositiveInt = _operational(2, "resumable commits kept per unfinished step")
    lease_ttl_s: PositiveFloat = _operational(
        30.0, "seconds after which a silent holder on another host is fenced off"
    )


class RayConfig(Section):
    """Where a run's actors live (compute ray) or its jobs go (compute ray-job).
    CPUs and GPUs are what Ray sets aside.
    """

    address: str = _operational(
        "",
        "ray: GCS of a cluster this machine is a node of (host:port, auto); empty: a local one that"
        " ends with the step. ray-job: the dashboard of a cluster, http://host:8265",
    )
    num_workers: PositiveInt = _operational(1, "processes that play episodes")
    num_ranks: PositiveInt = _operational(1, "processes that hold the trained weights")
    worker_cpus: NonNegativeFloat = _operational(1.0, "CPUs of one worker")
    worker_gpus: NonNegativeFloat = _operational(0.0, "GPUs of one worker")
    rank_cpus: NonNegativeFloat = _operational(
        1.0, "CPUs of one rank, and of a job that trains in its own process"
    )
    rank_gpus: NonNegativeFloat = _operational(0.0, "GPUs of one rank, and of such a job")
    max_lost_workers: NonNegativeInt = _operational(
        8, "lost workers replaced within one step of the pipeline; one more ends it"
    )
    placement_timeout_s: PositiveFloat = _operational(
        120.0, "seconds until the cluster has room, and again until a process is there"
    )
    rank_timeout_s: PositiveFloat = _operational(
        1800.0, "seconds of one call of the ranks, and of each exchange between them"
    )
    job_attempts: PositiveInt = _operational(
        2, "attempts at one step as a job, each under a name of its own"
    )
    job_timeout_s: PositiveFloat = _operational(24 * 3600.0, "seconds of one job")


class RunConfig(Section):
    """Everything a run needs to know."""

    seed: NonNegativeInt = _setting(0, "seed of every random draw")
    deterministic: bool = _setting(
        False, "one thread, fixed slots: a killed and resumed run ends bit-identical"
    )
    compute_device: Literal["cpu", "cuda"] = _setting(
        "cpu", "where models and batches are, in every back end; deterministic needs the CPU"
    )
    compute: Literal["inline", "ray", "ray-job"] = _operational(
        "inline", "where steps compute: this process, Ray actors, jobs on a Ray cluster"
    )
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    mix: tuple[EnvConfig, ...] = _setting((), "further environments of the same run")
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    horizon: HorizonConfig = HorizonConfig()
    offline: OfflineConfig = OfflineConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    store: StoreConfig = StoreConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.deterministic and self.compute_device != "cpu":
            raise ValueError(
                f"deterministic is promised on the CPU alone, and compute_device is"
                f" {self.compute_device}; set one of the two otherwise"
            )
        for name in ("worker", "rank"):
            gpus = getattr(self.ray, f"{name}_gpus")
            if self.compute == "ray" and (self.compute_device == "cuda") != bool(gpus):
                raise ValueError(
                    f"compute_device {self.compute_device} with ray.{name}_gpus {gpus:g}; with cuda"
                    " every worker and rank needs a share of a GPU, with cpu it would hold one and"
                    " not use it"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        recipe = RECIPES.get(self.algorithm.recipe)
        if recipe is None:
            raise ValueError(
                f"algorithm.recipe {self.algorithm.recipe!r} is unknown; known:"
                f" {', '.join(sorted(RECIPES))}"
            )
        if recipe.needs_groups and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size {self.rollout.group_size} leaves {self.algorithm.recipe}"
                " nothing to compare; use at least 2, or a recipe without groups"
            )
        if recipe.dynamic_sampling and self.algorithm.truncated == "mask":
            raise ValueError(
                f"algorithm.truncated mask empties the groups that {self.algorithm.recipe}"
                " compares; use zero"
            )
        if self.algorithm.truncated == "bootstrap" and not recipe.needs_critic:
            raise ValueError(
                f"algorithm.truncated bootstrap needs a critic, and recipe {self.algorithm.recipe}"
                " has none; use zero or mask, or ppo"
            )
        if self.warm_start.source == "trajectories" and not self.warm_start.enabled:
            raise ValueError(
                "warm_start.source trajectories with warm_start.enabled false reads none; enable"
                " it, or use source expert"
            )
        if recipe.loop != "rl":
            self._check_offline(recipe.loop)
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                "rollout.max_staleness 1 overlaps rollouts with the update, which no run repeats;"
                " use 0 with deterministic"
            )
        longest = max(*self.horizon.max_turns, self.evaluation.max_turns, self.validation.max_turns)
        needed = longest * (self.rollout.max_new_tokens + self.rollout.observation_tokens)
        if needed > self.model.context_tokens:
            raise ValueError(
                f"model.context_tokens {self.model.context_tokens} is too small for {longest} turns"
                f" of rollout.max_new_tokens {self.rollout.max_new_tokens} + observation_tokens"
                f" {self.rollout.observation_tokens} = {needed}; raise it or shorten the horizon"
            )
        for env in self.envs:
            if env.dialect != "native" and not env.endpoints:
                raise ValueError(
                    f"env.dialect {env.dialect} of {env.name} needs env.endpoints: such servers are"
                    " not started here"
                )
            if env.dialect != "native" and self.rollout.instructions:
                raise ValueError(
                    "rollout.instructions begins with a server's instructions, and one of dialect"
                    f" {env.dialect} ({env.name}) has none"
                )
        names = [env.name for env in self.envs]
        if len(set(names)) < len(names):
            raise ValueError(
                f"mix: the environments of a run must have different names, got {', '.join(names)};"
                " remove one"
            )
        for env in self.envs:
            if self.rollout.concurrency > env.max_sessions * max(1, len(env.endpoints)):
                raise ValueError(
                    f"rollout.concurrency {self.rollout.concurrency} is above env.max_sessions"
                    f" {env.max_sessions} ({env.name}); lower it or raise the other"
                )
        for name in ("worker", "rank"):
            if not getattr(self.ray, f"{name}_cpus") + getattr(self.ray, f"{name}_gpus"):
                raise ValueError(
                    f"ray.{name}_cpus and ray.{name}_gpus are both 0; Ray places only what takes"
                    " room, a fraction is enough"
                )
        is_http = self.ray.address.startswith(("http://", "https://"))
        if self.compute == "ray" and self.deterministic:
            raise ValueError(
                "compute ray plays episodes in several processes, which no run repeats to the bit;"
                " use inline with deterministic"
            )
        if self.compute == "ray-job" and not is_http:
            raise ValueError(
                f"ray.address {self.ray.address!r} must be a cluster's dashboard for compute"
                " ray-job, e.g. http://127.0.0.1:8265"
            )
        if self.compute == "ray" and is_http:
            raise ValueError(
                f"ray.address {self.ray.address} is a dashboard; compute ray joins host:port or"
                " auto, compute ray-job takes URLs"
            )
        return self

    def _check_offline(self, loop: Loop) -> None:
        name = self.algorithm.recipe
        if loop in ("sft", "evolve") and not self.warm_start.enabled:
            raise ValueError(
                f"recipe {name} learns from demonstrations, and warm_start.enabled false makes"
                " none; enable it, or use dpo"
            )
        if self.horizon.kind == "adaptive":
            raise ValueError(
                f"horizon.kind adaptive follows success step by step, which recipe {name} does not"
                " sample; use stepwise"
            )
        for key, given in (
            ("algorithm.kl_coef", self.algorithm.kl_coef),
            ("algorithm.entropy_coef", self.algorithm.entropy_coef),
            ("algorithm.shuffle_rewards", self.algorithm.shuffle_rewards),
            ("rollout.max_staleness", self.rollout.max_staleness),
        ):
            if given:
                raise ValueError(
                    f"{key} {given} means nothing to recipe {name}; leave it out, or use a recipe"
                    " of reinforcement learning"
                )

    @property
    def data_folders(self) -> dict[str, Path]:
        """The folders of data this run reads, by the setting that names them."""
        recorded = (
            {"data.trajectories": self.data.trajectories}
            if self.warm_start.source == "trajectories"
            else {}
        )
        return {"data.path": self.data.path, **recorded}

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
        """For people: `babyai`, or `babyai + textcraft`."""
        return " + ".join(env.name for env in self.envs)

    @property
    def state_dir(self) -> Path:
        """The folder all state of this project lives under."""
        return self.store.path.parent

    @property
    def tracking_uri(self) -> str:
        """MLflow's store; absolute, because MLflow freezes relative artifact roots where they
        were first used.
        """
        return self.tracking.uri or f"sqlite:///{(self.state_dir / 'mlflow.db').resolve()}"


def load_config(
    path: Path | str = "params.yaml",
    overrides: Sequence[str] = (),
    *,
    layers: Sequence[Mapping[str, Any]] = (),
) -> RunConfig:
    """Read a params file, apply `key.path=value` overrides, validate.

    A file may begin with `extends: OTHER` (a path relative to itself): its values then lie over the
    other file's.
    layers: mappings shaped like the file, each laid over what came before it, under the overrides.
    Errors: ConfigError with one line, also for a missing file or broken YAML.
    """
    tree = read_tree(Path(path))
    for layer in layers:
        tree = _merge(tree, layer)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"override {override!r} must look like key.path=value, for example"
                " optimizer.lr=3e-4"
            )
        _assign(tree, key.split("."), _parse(text), override)
    _check_size(tree, path)
    try:
        cfg = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error)) from None
    ray_address = "" if cfg.compute == "inline" else cfg.ray.address
    refused = untrusted_address(ray_address, cfg.tracking.uri, os.environ)
    if refused is not None:
        raise ConfigError(refused)
    return cfg


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a configuration, with what its section says of it."""

    section: str  # "" at the top, `warm_start.optimizer` inside another
    name: str
    value: Any
    default: Any
    changes_results: bool
    description: str


def settings(cfg: RunConfig) -> Iterator[Setting]:
    """Every setting, section by section."""
    yield from _settings(
        type(cfg), cfg.model_dump(mode="json"), RunConfig().model_dump(mode="json"), ()
    )


def _settings(
    kind: type[Section],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    section: tuple[str, ...],
) -> Iterator[Setting]:
    inner = []
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner.append((info.annotation, values[name], defaults[name], (*section, name)))
            continue
        yield Setting(
            ".".join(section),
            name,
            values[name],
            defaults[name],
            not _is_operational(info),
            info.description or "",
        )
    for each in inner:
        yield from _settings(*each)


def config_digest(semantic: dict[str, Any]) -> str:
    """sha256 of the canonical JSON of semantic fields."""
    return hashlib.sha256(
        json.dumps(semantic, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_tree(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping a YAML file holds, laid over the file it extends, if any.
    Errors: ConfigError with one line.
    """
    if path.resolve() in extended_by:
        raise ConfigError(
            f"{path} extends itself, by way of {', '.join(str(other) for other in extended_by)};"
            " remove one `extends`"
        )
    # so that no `extends` or flow parameter quotes a key file in its error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"parameter file {path} must end in .yaml or .yml")
    if not path.is_file():
        raise ConfigError(
            f"parameter file {path} does not exist; run from the project's root or name one with"
            " --params FILE"
        )
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    _check_size(tree, path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    base = tree.pop("extends", None)
    return (
        tree
        if base is None
        else _merge(read_tree(path.parent / str(base), (*extended_by, path.resolve())), tree)
    )


def _check_size(tree: Any, path: Path | str) -> None:
    """Errors: ConfigError where aliases (`*name`) unfold to more than a person writes, or to a
    loop: nobody would finish reading it.
    """
    waiting, num_values = [tree], 0
    while waiting:
        value = waiting.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise ConfigError(
                f"{path} unfolds to more than {MAX_VALUES} values; write fewer, or without aliases"
            )
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        # env.options is replaced whole: options of two environments must not mix
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "options"
        result[key] = _merge(result[key], value) if both else value
    return result


def _parse(text: str) -> Any:
    """YAML, plus the `1e-3` that YAML 1.1 reads as text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and value == text:  # quoted text stays text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(tree: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section"
            )
        tree = node
    tree[keys[-1]] = value


# setting of an earlier version -> its name today; a name that is nearly the same is found without
RENAMED = {"system_prompt": "instructions"}


def first_line(error: ValidationError, root: type[BaseModel] = RunConfig) -> str:
    """The first problem as one line, an unknown key with the nearest known one. root: what was
    validated.
    """
    problem = error.errors(include_url=False)[0]
    where = [str(part) for part in problem["loc"]]
    path = ".".join(where)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(where[:-1], root)
        sought = RENAMED.get(where[-1], where[-1])
        near = difflib.get_close_matches(sought, known, n=1, cutoff=0.6)
        hint = (
            f"did you mean {'.'.join([*where[:-1], near[0]])}?"
            if near
            else f"known: {', '.join(known)}"
        )
        return f"unknown key {path}; {hint}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    came = json.dumps(problem["input"], default=str)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {message}, got {came[:80]} ({type(problem['input']).__name__})"


def _known_keys(path: list[str], root: type[BaseModel]) -> list[str]:
    model = root
    for key in path:
        if key.isdigit():  # of a list: its entries have one model
            continue
        annotation = model.model_fields[key].annotation
        inner = [
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not inner:
            return []
        model = inner[0]
    return sorted(model.model_fields)
