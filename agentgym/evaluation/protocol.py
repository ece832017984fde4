"""Protocols of evaluations: environments, items, samples per item, turns and token limits.

A protocol is a YAML file, `profiles/eval/NAME.yaml`. It names no policy, so that every policy
evaluated under it is comparable with every other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

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

from agentgym.config import (
    ConfigError,
    EnvConfig,
    RunConfig,
    Section,
    first_line,
    owned_env,
    read_tree,
)
from agentgym.config.section import Seed, operational, setting
from agentgym.data.items import DataError, load_ids, load_splits, parse_item_id
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.types import Item

FOLDER = Path("profiles/eval")
OF_ROLLOUT = {  # settings of a run's rollouts that its evaluations share
    *("max_new_tokens", "instructions", "examples", "action_format"),
    *("episode_timeout_s", "max_attempts"),
}


class ItemsConfig(Section):
    """Items of an evaluation: those of a split, of a file, or named one by one."""

    split: Literal["test", "validation", "train"] = setting(
        "test", "items of the run's lists (data.path); ignored if ids or a file are given"
    )
    num: PositiveInt | None = setting(None, "the first of them, so many; null: all")
    ids: tuple[str, ...] = setting((), "item ids, for example babyai_17, in this order")
    file: Path | None = operational(
        None, "a JSON list of {item_id}, as the published ones; its items are in the digest"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ids and self.file is not None:
            raise ValueError("items.ids and items.file are both given; name the items once")
        if twice := sorted({item_id for item_id in self.ids if self.ids.count(item_id) > 1}):
            raise ValueError(
                f"items.ids names {twice[0]} twice; samples of an item have num_samples"
            )
        return self


class EnvProtocol(Section):
    """Settings of one environment in an evaluation."""

    env: EnvConfig = EnvConfig()
    items: ItemsConfig = ItemsConfig()
    num_samples: PositiveInt = setting(1, "samples of each item")
    greedy: bool = setting(False, "one greedy episode of each item, in addition to the samples")
    max_turns: PositiveInt = setting(12, "turns an episode may have")
    temperature: NonNegativeFloat = setting(1.0, "temperature of the samples; 0: greedy")
    max_new_tokens: PositiveInt = setting(512, "tokens of one action, at most")
    context_tokens: PositiveInt = setting(8192, "tokens of the longest episode")
    instructions: bool = setting(True, "episodes begin with the environment's instructions")
    examples: NonNegativeInt = setting(0, "worked examples shown after the instructions")
    action_format: Literal["plain", "react"] = setting(
        "plain", 'plain: the reply is the action; react: the text after "Action:"'
    )
    episode_timeout_s: PositiveFloat = setting(
        600.0,
        "seconds that an episode's environment may take in all; more, and the episode has failed",
    )
    max_attempts: PositiveInt = setting(3, "attempts at an episode that fails")

    def episodes(self, seed: int, instructions: Mapping[str, str]) -> EpisodeSettings:
        """Return the settings of sampled episodes. instructions: by environment."""
        return EpisodeSettings(
            seed=seed,
            step=0,
            max_turns=self.max_turns,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            context_tokens=self.context_tokens,
            instructions=instructions if self.instructions else {},
            action_format=self.action_format,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_new_tokens >= self.context_tokens:
            raise ValueError(
                f"{self.env.name}: max_new_tokens {self.max_new_tokens} leaves no room in"
                f" context_tokens {self.context_tokens}; raise the one or lower the other"
            )
        if self.examples and not self.instructions:
            raise ValueError(
                f"{self.env.name}: examples {self.examples} follow the instructions; set"
                " instructions true, or examples 0"
            )
        if self.env.weight != 1.0:
            raise ValueError(
                f"{self.env.name}: env.weight {self.env.weight:g} means nothing in an evaluation,"
                " where every item is played; leave it out"
            )
        for item_id in self.items.ids:
            env, task_id = parse_item_id(item_id)
            if env != self.env.name or task_id < 0:
                raise ValueError(
                    f"items.ids: {item_id!r} is no item of {self.env.name}; expected"
                    f" {self.env.name}_17 or alike"
                )
        return self

    @property
    def most_in_flight(self) -> int:
        """Maximum number of episodes that its servers play at a time."""
        return self.env.max_sessions * max(1, len(self.env.endpoints))

    @property
    def sample_numbers(self) -> tuple[int, ...]:
        """Numbers of the samples, from 1; 0 is the greedy episode, if there is one."""
        return tuple(range(0 if self.greedy else 1, 1 + self.num_samples))


class EvaluationProtocol(Section):
    """A whole protocol file. Every setting that changes a result is in the evaluation's digest."""

    name: str = operational("", "for people; its settings are its identity")
    follows: str = operational("", "the published protocol it follows, for people")
    departs: tuple[str, ...] = operational((), "what it does not follow of it, a line each")
    envs: tuple[EnvProtocol, ...] = setting((), "each environment of the evaluation", min_length=1)
    seed: Seed = setting(1, "seed of the samples")
    confidence: float = setting(0.95, "level of every interval", gt=0.5, lt=1)
    min_coverage: float = setting(
        0.95, "share of the episodes that must count; below it the result is invalid", ge=0, le=1
    )
    deterministic: bool = setting(
        False, "fixed slots, one environment after the other: killed and resumed, it ends the same"
    )
    fail_on_error: bool | NonNegativeInt | NonNegativeFloat = operational(
        False,
        "true: stop at the first episode that fails for good; a whole number: at more than so many;"
        " a share below 1: at more than this share of all episodes",
    )
    concurrency: PositiveInt = operational(64, "episodes in flight, over all environments")
    chunk_episodes: PositiveInt = operational(256, "episodes committed at a time")
    commit_every_s: PositiveFloat = operational(
        20.0, "seconds after which finished episodes are committed, fewer than chunk_episodes too"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [env_protocol.env.name for env_protocol in self.envs]
        if len(set(names)) < len(names):
            raise ValueError(
                f"envs: the environments must have different names, got {', '.join(names)}; remove"
                " one"
            )
        return self

    @property
    def env_configs(self) -> tuple[EnvConfig, ...]:
        return tuple(env_protocol.env for env_protocol in self.envs)

    def is_covered(self, coverage: float) -> bool:
        """Return True if enough episodes count for a valid result."""
        return coverage >= self.min_coverage - 1e-9

    def errors_allowed(self, num_episodes: int) -> float:
        """Return `fail_on_error` as the number of episodes that may fail for good; false: all."""
        limit = self.fail_on_error
        if isinstance(limit, bool):
            return 0 if limit else num_episodes
        return limit * num_episodes if isinstance(limit, float) and limit < 1 else limit

    def only(self, names: Sequence[str]) -> EvaluationProtocol:
        """Return the protocol with only these environments, in this order.
        Errors: ConfigError for an unknown one.
        """
        having = {env_protocol.env.name: env_protocol for env_protocol in self.envs}
        if unknown := [name for name in names if name not in having]:
            raise ConfigError(
                f"the protocol {self.name or 'given'} has no environment {unknown[0]!r}; it has:"
                f" {', '.join(having)}"
            )
        return self.model_copy(update={"envs": tuple(having[name] for name in names)})


def load_protocol(
    name: str, overrides: Mapping[str, Any] | None = None, folder: Path = FOLDER
) -> EvaluationProtocol:
    """Load a protocol from the file `name`, or from NAME.yaml in `folder`. Errors: ConfigError.
    overrides: values by field name, for every environment (`max_turns`, `items`, ...) or for the
    whole protocol (`seed`, ...).
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
            raise ConfigError(
                f"there is no protocol {name!r} in {folder}; known: {known}. A file ends in .yaml"
            )
    tree = {"name": path.stem, **read_tree(path)}
    return protocol_from(tree, overrides or {})


def protocol_from(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> EvaluationProtocol:
    """Return a YAML tree as a protocol. overrides: see `load_protocol`. Errors: ConfigError."""
    envs = tree.get("envs", ())
    tree = dict(tree)
    for key, value in overrides.items():
        if key in EnvProtocol.model_fields and isinstance(envs, list | tuple):
            envs = [_over(env, key, value) if isinstance(env, dict) else env for env in envs]
        else:
            tree[key] = value
    tree["envs"] = envs
    try:
        return EvaluationProtocol.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error, EvaluationProtocol)) from None


def owned_protocol(settings: Mapping[str, Any], servers: Sequence[EnvConfig]) -> EvaluationProtocol:
    """Return the protocol of a recorded evaluation, on the servers of the owner's configuration.
    servers: that configuration's environments. Errors: ConfigError, see `owned_env`.
    """
    recorded = protocol_from(settings, {})
    envs = tuple(
        env_protocol.model_copy(update={"env": owned_env(env_protocol.env, servers)})
        for env_protocol in recorded.envs
    )
    return recorded.model_copy(update={"envs": envs})


def _over(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    both = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping)
    return {**tree, key: {**tree[key], **value} if both else value}


def protocol_of_run(
    cfg: RunConfig, envs: Sequence[str], overrides: Mapping[str, Any] | None = None
) -> EvaluationProtocol:
    """Return the protocol of a run's own evaluations; an unknown environment has default settings.
    overrides: see `load_protocol`. Errors: ConfigError.
    """
    settings, rollout = cfg.evaluation, cfg.rollout
    known = {env.name: env.model_copy(update={"weight": 1.0}) for env in cfg.envs}
    shared = {
        "items": {"split": settings.split, "num": settings.num_items},
        "greedy": True,
        "context_tokens": cfg.model.context_tokens,
        **settings.model_dump(include={"num_samples", "max_turns", "temperature"}),
        **rollout.model_dump(include=OF_ROLLOUT),
    }
    tree = {
        "name": f"evaluation of {cfg.env_names}",
        "envs": [
            {**shared, "env": known[name].model_dump() if name in known else {"name": name}}
            for name in envs
        ],
        **settings.model_dump(include={"seed", "confidence", "min_coverage"}),
        "deterministic": cfg.deterministic,
        "concurrency": rollout.concurrency,
    }
    return protocol_from(tree, overrides or {})


def items_of(protocol: EvaluationProtocol, cfg: RunConfig) -> dict[str, tuple[Item, ...]]:
    """Return the items of each environment, in order. cfg: has the item lists and validation split.
    Errors: DataError if there are fewer than `items.num`, or if a list is missing or invalid.
    """
    return {env_protocol.env.name: _items(env_protocol, cfg) for env_protocol in protocol.envs}


def _items(env_protocol: EnvProtocol, cfg: RunConfig) -> tuple[Item, ...]:
    env, chosen = env_protocol.env.name, env_protocol.items
    if chosen.file is not None or chosen.ids:
        ids = chosen.ids if chosen.file is None else load_ids(chosen.file, env)
        items = tuple(Item(env, parse_item_id(item_id)[1], "given") for item_id in ids)
        source = str(chosen.file or "items.ids")
    else:
        splits = load_splits(
            cfg.data.path, env, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
        )
        items = getattr(splits, chosen.split)
        source = f"the {chosen.split} split of {cfg.data.path}"
    if chosen.num is not None and chosen.num > len(items):
        raise DataError(
            f"{env}: items.num {chosen.num} is more than the {len(items)} items of {source}; lower"
            " it: --num-items, or evaluation.num_items of a run"
        )
    return items[: chosen.num]


class EvaluationRequest(BaseModel):
    """Policy, protocol and limits of an evaluation that a user asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(
        min_length=1,
        title="Policy",
        description="expert, random, echo:ACTION, RUN:STEP, models:/NAME@ALIAS, the URL of an"
        " OpenAI-compatible endpoint, a folder, or OWNER/NAME of the Hub",
    )
    envs: tuple[str, ...] = Field((), title="Environments", description="empty: the protocol's")
    protocol: str = Field(
        "",
        title="Protocol",
        description="a file, or a name in profiles/eval; empty: that of the run's own evaluations",
    )
    changes: dict[str, Any] = Field(
        {}, title="Changes", description="fields of the protocol, such as max_turns or num_samples"
    )
    kept: tuple[str, ...] = Field(
        (),
        title="Kept",
        description="fields of a run's protocol that hold for models that were not trained here,"
        " too, because the user set them: instructions, max_new_tokens, context_tokens",
    )
    engine: Literal["", "torch", "vllm"] = Field("", description="empty: rollout.engine")
    model: str = Field("", description="of an endpoint; empty: the only one it has")
    key_variable: str = Field("", description="AGENTGYM_SECRET_...: holds the endpoint's key")
    timeout_s: PositiveFloat = Field(60.0, description="seconds of one request to an endpoint")
    max_retries: int = Field(5, ge=0, description="of one request to an endpoint")
    max_concurrency: PositiveInt = Field(64, description="requests in flight to an endpoint")
    max_per_minute: NonNegativeFloat = Field(0.0, description="requests to it; 0: no limit")
    prices: Path | None = Field(None, description="file of what tokens cost, by model")
    max_cost: PositiveFloat | None = Field(None, description="no request begins above it")
