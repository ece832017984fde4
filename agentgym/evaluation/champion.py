"""Which registered model holds the alias.

The rule: the alias moves to a new model where none holds it, or where the new model, paired item by
item with the one that does and with failed episodes as failures, has at least its mean sampled
success.
A model evaluated on other items or by another protocol cannot be compared, and the alias stays; so
no sequence of registrations lets the champion's measured success fall.
The first model of a registry becomes champion whatever it scores: there is nothing to protect.

What an evaluation found travels with the registered version, as tags; the decision is one of them,
written before the alias moves.
Doing it again, also after a kill in between, applies the decision that was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgym.config import RENAMED, EvaluationConfig, RunConfig
from agentgym.evaluation.clustered import family_codes
from agentgym.evaluation.passk import FloatArray, Interval, as_failures
from agentgym.evaluation.score import Asked, paired
from agentgym.store.manifest import sha256
from agentgym.tracking.registry import alias_version, version_tags

if TYPE_CHECKING:
    from agentgym.tracking.mlflow import Tracker

PROTOCOL, OUTCOMES, DECISION = "evaluation.protocol", "evaluation.outcomes", "champion"
FAMILIES = "evaluation.families"  # of each item, as a number
MAX_TAG_CHARS = 100_000  # MLflow's
_LETTERS = {0.0: "0", 1.0: "1"}

# moved, why, over (version or None), over_evaluation, difference (an interval or None)
Decision = dict[str, Any]


def evaluation_tags(cfg: RunConfig, digest: str, outcomes: Mapping[str, Any]) -> dict[str, str]:
    """What a later model needs to compare itself with this one. digest: of the evaluation;
    outcomes: as it stored them, with the items' `families`, where they are told.
    """
    settings = cfg.evaluation
    protocol = {
        "env": [
            {"name": env.name, "options": env.options, "dialect": env.dialect} for env in cfg.envs
        ],
        "items": sha256(json.dumps(outcomes["items"]).encode()),
        "action_format": cfg.rollout.action_format,
        "instructions": cfg.rollout.instructions,
        **{
            name: getattr(settings, name)
            for name in ("split", "num_items", "num_samples", "max_turns", "temperature")
        },
    }
    columns = np.column_stack(
        [np.array(outcomes[name], dtype=float) for name in ("greedy", "samples")]
    ).T
    text = " ".join(
        "".join(_LETTERS.get(float(value), "-") for value in column) for column in columns
    )
    tags = {"evaluation": digest, PROTOCOL: json.dumps(protocol, sort_keys=True)}
    codes = family_codes(outcomes.get("families"))
    if codes is not None:
        tags[FAMILIES] = " ".join(map(str, codes))
    return tags | ({OUTCOMES: text} if len(text) <= MAX_TAG_CHARS else {})


def settle(
    tracker: Tracker, name: str, alias: str, version: str, settings: EvaluationConfig
) -> Decision:
    """Decide whether `version` takes `alias`, and move it; once per evaluation of a version,
    whatever is killed in between.
    """
    ours = version_tags(tracker, name, version)
    holder = alias_version(tracker, name, alias)
    recorded = json.loads(ours[DECISION]) if DECISION in ours else None
    if recorded is None or recorded["evaluation"] != ours["evaluation"]:
        recorded = decide(
            ours, version, holder, version_tags(tracker, name, holder) if holder else {}, settings
        )
        tracker.client.set_model_version_tag(name, version, DECISION, json.dumps(recorded))
    if recorded["moved"] and holder in (None, recorded["over"]):
        tracker.client.set_registered_model_alias(name, alias, version)
    return {key: value for key, value in recorded.items() if key != "evaluation"}


def sentence(registered: Mapping[str, Any]) -> str:
    """What became of the alias, from the results of `register`: one line without its name."""
    found = registered["champion"]
    if found["moved"]:
        return f"moves to version {registered['version']}: {found['why']}"
    return f"stays with version {found['over']}: {found['why']}"


def decide(
    ours: Mapping[str, str],
    version: str,
    holder: str | None,
    theirs: Mapping[str, str],
    settings: EvaluationConfig,
) -> Decision:
    """ours, theirs: tags of the new version and of the one that holds the alias.
    Errors: none; what cannot be read is incomparable.
    """
    decision: Decision = {
        "evaluation": ours["evaluation"],
        "over": holder,
        "over_evaluation": theirs.get("evaluation"),
        "difference": None,
    }
    if holder is None:
        return decision | {"moved": True, "why": "the first model of this name"}
    if holder == version:
        return decision | {"moved": False, "why": "it is this model, evaluated anew"}
    obstacle = incomparable(ours, theirs)
    if obstacle:
        return decision | {
            "moved": False,
            "why": f"it cannot be compared with version {holder}: {obstacle}",
        }
    gain = _gain(theirs[OUTCOMES], ours[OUTCOMES], ours.get(FAMILIES, ""), settings)
    said = (
        f"{100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] over"
        f" version {holder}, on the same items"
    )
    return decision | {"moved": gain.mean >= 0, "why": said, "difference": gain.to_json()}


def incomparable(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Why two evaluations cannot be set side by side; empty where they can."""
    for tags, whose in ((theirs, "its"), (ours, "the new model's")):
        if not {PROTOCOL, OUTCOMES} <= tags.keys():
            return f"{whose} evaluation is not on record item by item"
    try:
        one, other = (
            {RENAMED.get(key, key): value for key, value in json.loads(tags[PROTOCOL]).items()}
            for tags in (ours, theirs)
        )
        differ = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        if differ:
            return f"their evaluations differ in {', '.join(differ)}"
        shape = _parse(ours[OUTCOMES]).shape
        same = shape == _parse(theirs[OUTCOMES]).shape
        if FAMILIES in ours and ours[FAMILIES].count(" ") != shape[1] - 1:
            raise ValueError("a family is told of every item, or of none")
    except (ValueError, AttributeError):
        return "a tag of the registry is damaged"
    return "" if same else "their evaluations differ in how many episodes are on record"


def _gain(theirs: str, ours: str, families: str, settings: EvaluationConfig) -> Interval:
    """families: as FAMILIES has them; empty: every item is one."""
    before, after = (
        (table[0], table[1:].T) for table in map(as_failures, (_parse(theirs), _parse(ours)))
    )
    told = families.split(" ") if families else [None] * len(after[0])
    gains = paired(before, after, told, Asked((), settings.confidence))
    return gains[f"avg_at_{after[1].shape[1]}"]


def _parse(text: str) -> FloatArray:
    """[1 + samples, items]; NaN for a failed episode. Errors: ValueError."""
    values = {"0": 0.0, "1": 1.0, "-": np.nan}
    if not set(text) <= {*values, " "}:
        raise ValueError("outcomes are written with 0, 1 and -")
    return np.array([[values[letter] for letter in column] for column in text.split(" ")])
