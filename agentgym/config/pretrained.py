"""Defaults of settings for a pretrained model.

The fields of the sections hold the settings of the small default model. Actions, contexts,
learning rates and the size of evaluations of a pretrained model differ by an order of magnitude,
and its prompt must explain the environment's grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentgym.config.sections import EvaluationConfig, HorizonConfig, ValidationConfig


@dataclass(frozen=True, slots=True)
class Default:
    """The value of one setting, and the reason for it."""

    value: Any
    why: str


# (action, observation) in tokens. Actions and observations measured with SmolLM2's tokenizer have
# their 90th percentile at half of these or less.
LENGTHS = {
    "babyai": (24, 48),
    "textcraft": (32, 64),
    "searchqa": (64, 384),
    "sciworld": (32, 192),
    "webarena": (128, 1536),
}
OTHER_LENGTHS = (64, 256)
THOUGHT = 160  # tokens before the action of a reply in react's format
INSTRUCTIONS = 512  # tokens, the longest first observation included
STEP = 128  # context lengths are multiples of it
RELEVANT = ("kind", "max_turns", "stage_steps")  # settings that bound the turns of an episode


def defaults(tree: Mapping[str, Any]) -> dict[str, Default]:
    """Return the defaults of a pretrained model, by dotted path.
    tree: a mapping shaped like params.yaml. The defaults depend on its environments, horizons,
    action format and lora; invalid values are left for the validation to name. With invalid turns
    there is no default of `model.context_tokens`.
    """
    mix = tree.get("mix")
    others = mix if isinstance(mix, (list, tuple)) else ()
    envs = [_section(tree, "env"), *(env for env in others if isinstance(env, Mapping))]
    names = [str(env.get("name", "babyai")) for env in envs]
    lengths = [LENGTHS.get(name, OTHER_LENGTHS) for name in names]
    rollout, lora = _section(tree, "rollout"), _section(tree, "lora")
    is_lora = isinstance(lora.get("rank"), int) and lora["rank"] > 0
    thought = THOUGHT if rollout.get("action_format") == "react" else 0
    action, observation = (max(column) for column in zip(*lengths, strict=True))
    is_native = all(env.get("dialect", "native") == "native" for env in envs)
    of_envs = f"for {' + '.join(names)}"
    kind = "LoRA" if is_lora else "all weights"
    result = {
        "rollout.instructions": Default(
            is_native,
            "it has never seen the environment's grammar"
            if is_native
            else "servers of another dialect have no instructions",
        ),
        "rollout.max_new_tokens": Default(
            action + thought, f"one action {of_envs}" + (", after a thought" if thought else "")
        ),
        "rollout.observation_tokens": Default(observation, f"one observation {of_envs}"),
        "warm_start.num_demos": Default(64, "it learns a grammar from few"),
        "warm_start.steps": Default(8, "one pass over 64 demonstrations"),
        "warm_start.batch_size": Default(8, "one pass over 64 demonstrations"),
        "warm_start.optimizer.lr": Default(2e-4 if is_lora else 5e-5, kind),
        "warm_start.optimizer.warmup_steps": Default(1, "of 8 steps"),
        "optimizer.lr": Default(5e-5 if is_lora else 1e-5, kind),
        "optimizer.grad_clip": Default(1.0, "usual for language models"),
        "evaluation.num_items": Default(64, "an episode costs a thousand times the tiny model's"),
        "evaluation.num_samples": Default(2, "an episode costs a thousand times the tiny model's"),
        "evaluation.k": Default([1, 2], "as evaluation.num_samples"),
    }
    turns = _longest(tree)
    if turns is not None:
        sizes = {name: rollout.get(name) for name in ("max_new_tokens", "observation_tokens")}
        num_action, num_observation = (
            value if isinstance(value, int) else result[f"rollout.{name}"].value
            for name, value in sizes.items()
        )
        needed = INSTRUCTIONS + turns * (num_action + num_observation)
        result["model.context_tokens"] = Default(
            -(-needed // STEP) * STEP, f"instructions and {turns} turns"
        )
    return result


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the tree in which missing settings have a pretrained model's defaults. A
    section that is no mapping stays as it is.
    """
    result = dict(tree)
    for path, default in defaults(tree).items():
        *sections, name = path.split(".")
        inner = result
        for section in sections:
            if not isinstance(inner.get(section, {}), Mapping):
                break
            inner[section] = dict(inner.get(section, {}))
            inner = inner[section]
        else:
            inner.setdefault(name, default.value)
    return result


def without_sizes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the tree without the settings that `defaults` has values for."""
    paths = defaults({})

    def copied(inner: Mapping[str, Any], at: str) -> dict[str, Any]:
        return {
            key: copied(value, f"{at}{key}.") if isinstance(value, Mapping) else value
            for key, value in inner.items()
            if f"{at}{key}" not in paths
        }

    return copied(tree, "")


def is_pretrained(tree: Mapping[str, Any]) -> bool:
    """Return True if the tree names a pretrained model (`model.source` is hub)."""
    return bool(_section(tree, "model").get("source") == "hub")


def _longest(tree: Mapping[str, Any]) -> int | None:
    """Return the largest `max_turns` of training, evaluation and validation; None if invalid."""

    def relevant(name: str) -> dict[str, Any]:
        return {key: value for key, value in _section(tree, name).items() if key in RELEVANT}

    try:
        horizon = HorizonConfig.model_validate(relevant("horizon"))
        evaluation = EvaluationConfig.model_validate(relevant("evaluation"))
        validation = ValidationConfig.model_validate(relevant("validation"))
    except ValidationError:
        return None
    return max(*horizon.max_turns, evaluation.max_turns, validation.max_turns)


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}
