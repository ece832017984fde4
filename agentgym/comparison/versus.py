"""Results of evaluations beside each other: what each shows against the first one, and how its
success grows with what an episode may take. JSON types, from which text and page are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.episodes import FILE, read_episodes
from agentgym.evaluation.paired import (
    Decision,
    Incomparable,
    align,
    compare,
    detectable_with,
)
from agentgym.evaluation.policies import PolicyName
from agentgym.evaluation.record import find
from agentgym.evaluation.result import RESULT, Result, ResultError, Slot
from agentgym.evaluation.scaling import Curve, by_turns, obstacle, within
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.pipeline.export import commit_of
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import BlobMissing, DigestMismatch, RunStore

SCHEMA_VERSION = 1
ITEMS = (100, 200, 500)  # for which the smallest difference is told
LOOKED_AT = 50  # episodes, for what a policy is told of its horizon


@dataclass(frozen=True)
class Named:
    """A result and what it is called here."""

    name: str
    result: Result
    folder: Path | None = None  # of its files


def is_result(word: str) -> bool:
    """Return True if a word of the command line names the file of a result."""
    path = Path(word)
    return path.name == RESULT or (path.is_dir() and (path / RESULT).is_file())


def find_result(word: str, cfg: RunConfig) -> Named:
    """Return a result: by the beginning of an evaluation's digest, by a step of a run (`:stage-3`,
    `RUN:stage-3`: the run's own evaluation of it), or by a folder or its result.json.

    One that the store has is computed from its episodes; a file from elsewhere is taken as it is,
    and its name says so. Errors: ConfigError.
    """
    path, files = Path(word), cfg.state_dir / "evaluations"
    try:
        if is_result(word):
            folder = path.parent if path.name == RESULT else path
            if folder.resolve().parent != files.resolve():
                kept = Result.load(path)
                return Named(f"{_name(kept, folder.name)}, not checked: a file", kept, folder)
            word = folder.name
        store = open_store(cfg)
        head = _of_step(cfg, store, word) if ":" in word else find(store, word)
        result, folder = stored_result(store, head), files / head.key[:12]
        return Named(_name(result, folder.name), result, folder if folder.is_dir() else None)
    except (ResultError, NumbersChanged, BlobMissing, DigestMismatch) as error:
        raise ConfigError(f"{word}: {error}") from None


def _name(result: Result, place: str) -> str:
    return f"{result.about.get('policy') or 'a policy'} ({place})"


def _of_step(cfg: RunConfig, store: RunStore, word: str) -> Manifest:
    """The run's own evaluation of a step. Errors: ConfigError where there is none."""
    name = PolicyName.parse(word)
    weights = commit_of(cfg, store, name.name, run=name.of)
    for head in reversed(store.heads(f"evaluate-{name.name}")):
        if head.done and weights.digest in head.parents.values():
            return head
    raise ConfigError(f"{word} has no evaluation of its run; `agentgym evaluate {word}` makes one")


def versus(named: Sequence[Named], *, confidence: float | None = None) -> dict[str, Any]:
    """What every result shows against the first one. confidence: default, the protocol's.
    Errors: ConfigError where two of them do not answer one question, telling how.
    """
    if len(named) < 2:
        raise ConfigError("a comparison needs two results or more")
    first, *others = named
    level = confidence or float(first.result.identity["protocol"].get("confidence", 0.95))
    for each in named:
        floor = float(each.result.about.get("min_coverage", 0.0))
        if each.result.coverage < floor - 1e-9:
            raise ConfigError(
                f"{each.name} is invalid: coverage {each.result.coverage:.1%} is below"
                f" {floor:.1%}; see to the environment and run `agentgym evaluate` again"
            )
    contrasts = []
    for other in others:
        try:
            decisions = compare(align(first.result, other.result), confidence=level)
        except (Incomparable, ValueError) as error:
            raise ConfigError(f"{first.name} and {other.name}: {error}") from None
        contrasts.append(_contrast(first, other, decisions, level))
    return {
        "schema_version": SCHEMA_VERSION,
        "confidence": level,
        "baseline": first.name,
        "results": [_result_json(each, level) for each in named],
        "contrasts": contrasts,
    }


def _contrast(
    first: Named, other: Named, decisions: dict[str, Decision], confidence: float
) -> dict[str, Any]:
    return {
        "before": first.name,
        "after": other.name,
        "same_policy": first.result.identity["policy"] == other.result.identity["policy"],
        "verdict": overall([each.verdict for each in decisions.values()]),
        "envs": {
            env: {
                **each.to_json(),
                "detectable_with": {str(items): detectable_with(each, items) for items in ITEMS},
            }
            for env, each in decisions.items()
        },
    }


def overall(verdicts: Sequence[str]) -> str:
    """Of all environments: better or worse where some are and none is the contrary, else `mixed`
    or `not shown`.
    """
    found = set(verdicts) - {"not shown"}
    return "mixed" if len(found) == 2 else next(iter(found), "not shown")


def _result_json(named: Named, confidence: float) -> dict[str, Any]:
    result = named.result
    return {
        "name": named.name,
        "digest": result.digest,
        "coverage": result.coverage,
        "envs": {
            env: {
                "summary": result.numbers[env]["summary"],
                "pass_curves": result.numbers[env].get("curves", {}),
                **_curves_json(named, env, confidence),
            }
            for env in result.envs
        },
    }


def _curves_json(named: Named, env: str, confidence: float) -> dict[str, Any]:
    """Success against what an episode may take; against turns only where a horizon cannot have
    changed what was done.
    """
    most = horizon_of(named.result, env)
    why = obstacle(_told(named, env), most)
    found = curves(named.result, env, most, confidence)
    kept = [each for each in found if each is not None and not (why and each.axis == "turns")]
    return {"curves": [each.to_json() for each in kept], "no_turns_curve": why}


def horizon_of(result: Result, env: str) -> int:
    """Turns its episodes could have."""
    for each in result.identity["protocol"]["envs"]:
        if each["env"]["name"] == env:
            return int(each["max_turns"])
    return max(slot.num_turns for slot in result.of(env))


def curves(result: Result, env: str, max_turns: int, confidence: float) -> list[Curve | None]:
    """Success of an environment's samples against turns, tokens that the policy said, seconds;
    None where a cost is not known.
    """
    sampled = sampled_slots(result.of(env))
    if not any(slot.counts for slot in sampled):
        return []
    said = [
        float(slot.usage.output_tokens) if slot.usage.known["output"] else None for slot in sampled
    ]
    seconds = [slot.wall_s or None for slot in sampled]
    return [
        by_turns(sampled, max_turns, confidence=confidence),
        within(sampled, said, "tokens", confidence=confidence),
        within(sampled, seconds, "seconds", confidence=confidence),
    ]


def sampled_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Of one environment; the greedy ones where there are no others."""
    return [slot for slot in slots if slot.sample] or list(slots)


def _told(named: Named, env: str) -> Iterator[str]:
    """What a policy was shown: its instructions, and the first episodes on record."""
    yield named.result.about.get("instructions", {}).get(env, "")
    folder = named.folder
    if folder is None or not (folder / FILE).is_file():
        return
    rows = (row for row in read_episodes(folder / FILE) if row["env"] == env)
    for row in islice(rows, LOOKED_AT):
        yield row["first_observation"]
        yield from (turn["observation"] for turn in row["turns"])
