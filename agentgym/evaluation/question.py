"""Question that a registered model was judged on: environments, item lists and protocol.

A candidate may replace a champion only if both were judged on the same question. It is a tag of the
version, so it can be read without the store in which the version was made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Self

from agentgym.data.items import Splits, splits_from_json
from agentgym.evaluation.history import Version
from agentgym.store.manifest import BlobMissing, Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.registry import version_run_tags, version_tags

TAG = "evaluation.question"  # of a registered version
DATA = "prepare"  # the step whose splits an evaluation's items come from
# settings that change the question; others change the number of items, or only how it is computed
PROTOCOL = (
    "model.context_tokens",
    "rollout.max_new_tokens",
    "rollout.instructions",
    "rollout.examples",
    "rollout.action_format",
)
OF_EVALUATION = ("max_turns", "split", "temperature")


@dataclass(frozen=True)
class Question:
    """Environments, items and protocol of an evaluation. Unknown parts are absent, not compared."""

    envs: Mapping[str, Mapping[str, Any]]  # name -> options and dialect
    # name of an environment -> sha256 of the list that its first items are from
    items: Mapping[str, str] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)  # setting -> value

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s text. Errors: ValueError or TypeError if it is not one."""
        return cls(**json.loads(text))

    @property
    def env_names(self) -> str:
        """Names of the environments in alphabetical order, for people."""
        return " + ".join(sorted(self.envs))


def question_asked(config: Mapping[str, Any], splits: Splits) -> Question:
    """Return the question of a run's evaluation. config: the run's settings as JSON types, perhaps
    of an earlier release that lacks some; splits: the run's items.
    """
    settings = config["evaluation"]
    listed: dict[str, list[str]] = {}
    for item in getattr(splits, settings["split"]):
        listed.setdefault(item.env, []).append(item.item_id)
    return Question(
        {
            env["name"]: {"options": env["options"], "dialect": env["dialect"]}
            for env in (config["env"], *config["mix"])
        },
        {env: sha256(canonical_json(ids)) for env, ids in listed.items()},
        {
            **{name: config[name] for name in PROTOCOL if name in config},
            **{f"evaluation.{name}": settings[name] for name in OF_EVALUATION},
        },
    )


def question_of_evaluation(store: RunStore, evaluation: Manifest) -> Question | None:
    """Return the question of a run's own evaluation; None if the store lacks the run's items."""
    wanted = evaluation.parents.get(DATA)
    data = next((head for head in store.heads(DATA) if head.digest == wanted), None)
    if data is None:
        return None
    try:
        splits = splits_from_json(store.read(data, "splits.json"))
    except BlobMissing:
        return None
    return question_asked(evaluation.config, splits)


def question_of_version(
    stores: Iterable[RunStore], tracker: Tracker, model: str, version: Version
) -> Question | None:
    """Return the question of a version: from its tag; else from its evaluation in the first store
    that has it; else only the environments, from its MLflow run. None if unknown, or if that store
    lacks the run's items. Errors: ValueError or TypeError for a damaged tag.
    """
    try:
        tags = version_tags(tracker, model, version.number)
    except LookupError:
        tags = {}
    if TAG in tags:
        return Question.from_json(tags[TAG])
    for store in stores:
        if (final := version.evaluation_in(store)) is not None:
            return question_of_evaluation(store, final)
    names = version_run_tags(tracker, model, version.number).get("environment", "")
    return Question({name: {} for name in names.split(" + ")}) if names else None


def other_question(ours: Question, champions: Question, *, envs_only: bool = False) -> str:
    """Return why a candidate judged on `ours` cannot replace a champion judged on `champions`; else
    "". envs_only: the gate's own protocol judges both, so only the environments are compared.
    """
    unlike = unlike_parts(ours, champions)
    if ours.envs.keys() != champions.envs.keys():
        return (
            f"{'; '.join(unlike)}; give it a name of its own (registry.model_name; empty: by its"
            " environments)"
        )
    if envs_only or not unlike:
        return ""
    return (
        f"{'; '.join(unlike)}; judge both by one protocol (gate.protocol), or give it a name of its"
        " own (registry.model_name)"
    )


def unlike_parts(ours: Question, champions: Question) -> list[str]:
    """Return a line for each difference; only one if the environments differ; none if equal."""
    if ours.envs.keys() != champions.envs.keys():
        return [f"its environments are {ours.env_names}, the champion's {champions.env_names}"]
    return [
        *chain(*(_unlike(f"{env}: ", ours.envs[env], champions.envs[env]) for env in ours.envs)),
        *(
            f"its items of {env} are of another list"
            for env in ours.items.keys() & champions.items.keys()
            if ours.items[env] != champions.items[env]
        ),
        *_unlike("", ours.protocol, champions.protocol),
    ]


def _unlike(prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that both have with different values."""
    return [
        f"{prefix}{name} is {_short(ours[name])}, the champion's {_short(theirs[name])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:97]}..."
