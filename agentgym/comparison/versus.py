"""Comparison of evaluation results: each one against the first one, and success as a function of an
episode's budget. JSON types, the source of text and page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.paired import Decision, Incomparable, align, compare, detectable_with
from agentgym.evaluation.parquet import FILE, read_episodes
from agentgym.evaluation.policies import PolicyName
from agentgym.evaluation.record import find
from agentgym.evaluation.result import RESULT, Result, ResultError, Slot
from agentgym.evaluation.scaling import Curve, by_turns, obstacle, within
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.pipeline.contenders import commit_of
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest
from agentgym.store.runstore import RunStore

SCHEMA_VERSION = 1
ITEMS = (100, 200, 500)  # numbers of items for which the smallest detectable difference is reported
LOOKED_AT = 50  # episodes searched for a mention of the horizon


@dataclass(frozen=True)
class NamedResult:
    """A result and its name in the comparison."""

    name: str
    result: Result
    folder: Path | None = None  # of its files


def is_result(word: str) -> bool:
    """Return True if a word of the command line is a result's file or a folder with one."""
    path = Path(word)
    return path.name == RESULT or (path.is_dir() and (path / RESULT).is_file())


def find_result(word: str, cfg: RunConfig) -> NamedResult:
    """Return a result: by the beginning of an evaluation's digest, by a step of a run (`:stage-3`,
    `RUN:stage-3`: the run's own evaluation of it), or by a folder or its result.json.

    A result in the store is computed from its episodes; a file from elsewhere is taken unchecked,
    and its name states this. Errors: ConfigError.
    """
    path, files = Path(word), cfg.state_dir / "evaluations"
    try:
        if is_result(word):
            folder = path.parent if path.name == RESULT else path
            if folder.resolve().parent != files.resolve():
                loaded = Result.load(path)
                return NamedResult(
                    f"{_name(loaded, folder.name)}, not checked: a file", loaded, folder
                )
            word = folder.name
        store = open_store(cfg)
        head = _of_step(cfg, store, word) if ":" in word else find(store, word)
        result, folder = stored_result(store, head), files / head.key[:12]
        return NamedResult(_name(result, folder.name), result, folder if folder.is_dir() else None)
    except (ResultError, NumbersChanged, BlobMissing, DigestMismatch) as error:
        raise ConfigError(f"{word}: {error}") from None


def _name(result: Result, location: str) -> str:
    return f"{result.about.get('policy') or 'a policy'} ({location})"


def _of_step(cfg: RunConfig, store: RunStore, word: str) -> Manifest:
    """Return the run's own evaluation of a step. Errors: ConfigError if there is none."""
    name = PolicyName.parse(word)
    weights = commit_of(cfg, store, name.name, run=name.of)
    for head in reversed(store.heads(f"evaluate-{name.name}")):
        if head.done and weights.digest in head.parents.values():
            return head
    raise ConfigError(f"{word} has no evaluation of its run; `agentgym evaluate {word}` makes one")


def versus(named: Sequence[NamedResult], *, confidence: float | None = None) -> dict[str, Any]:
    """Return the comparison of every result with the first one. confidence: default, the
    protocol's.
    Errors: ConfigError for one result alone, one with too little coverage, or different questions.
    """
    if len(named) < 2:
        raise ConfigError("a comparison needs two results or more")
    first, *others = named
    level = confidence or float(first.result.identity["protocol"].get("confidence", 0.95))
    for entry in named:
        floor = float(entry.result.about.get("min_coverage", 0.0))
        if entry.result.coverage < floor - 1e-9:
            raise ConfigError(
                f"{entry.name} is invalid: coverage {entry.result.coverage:.1%} is below"
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
        "results": [_result_json(entry, level) for entry in named],
        "contrasts": contrasts,
    }


def _contrast(
    first: NamedResult, other: NamedResult, decisions: dict[str, Decision], confidence: float
) -> dict[str, Any]:
    return {
        "before": first.name,
        "after": other.name,
        "same_policy": first.result.identity["policy"] == other.result.identity["policy"],
        "verdict": overall([decision.verdict for decision in decisions.values()]),
        "envs": {
            env: {
                **decision.to_json(),
                "detectable_with": {
                    str(items): detectable_with(decision, items) for items in ITEMS
                },
            }
            for env, decision in decisions.items()
        },
    }


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict over all environments: `mixed` if some are better and some are worse, else
    the one verdict that some of them show, or `not shown`.
    """
    shown = set(verdicts) - {"not shown"}
    return "mixed" if len(shown) == 2 else next(iter(shown), "not shown")


def _result_json(named: NamedResult, confidence: float) -> dict[str, Any]:
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


def _curves_json(named: NamedResult, env: str, confidence: float) -> dict[str, Any]:
    """Return success against an episode's budget; against turns only if the horizon cannot have
    changed the policy's actions.
    """
    max_turns = horizon_of(named.result, env)
    why = obstacle(_told(named, env), max_turns)
    candidates = curves(named.result, env, max_turns, confidence)
    shown = [
        curve for curve in candidates if curve is not None and not (why and curve.axis == "turns")
    ]
    return {"curves": [curve.to_json() for curve in shown], "no_turns_curve": why}


def horizon_of(result: Result, env: str) -> int:
    """Maximum number of turns of an episode; the longest one's if the protocol has no number."""
    for env_protocol in result.identity["protocol"]["envs"]:
        if env_protocol["env"]["name"] == env:
            return int(env_protocol["max_turns"])
    return max(slot.num_turns for slot in result.of(env))


def curves(result: Result, env: str, max_turns: int, confidence: float) -> list[Curve | None]:
    """Return the success of an environment's samples against turns, generated tokens and seconds;
    None in place of a curve whose costs are not known; an empty list if no sample counts.
    """
    sampled = sampled_slots(result.of(env))
    if not any(slot.counts for slot in sampled):
        return []
    num_tokens = [
        float(slot.usage.output_tokens) if slot.usage.known["output"] else None for slot in sampled
    ]
    seconds = [slot.wall_s or None for slot in sampled]
    return [
        by_turns(sampled, max_turns, confidence=confidence),
        within(sampled, num_tokens, "tokens", confidence=confidence),
        within(sampled, seconds, "seconds", confidence=confidence),
    ]


def sampled_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Return the sampled slots of one environment; the greedy ones if there are no others."""
    return [slot for slot in slots if slot.sample] or list(slots)


def _told(named: NamedResult, env: str) -> Iterator[str]:
    """Yield the texts that a policy was shown: its instructions and its first episodes."""
    yield named.result.about.get("instructions", {}).get(env, "")
    folder = named.folder
    if folder is None or not (folder / FILE).is_file():
        return
    rows = (row for row in read_episodes(folder / FILE) if row["env"] == env)
    for row in islice(rows, LOOKED_AT):
        yield row["first_observation"]
        yield from (turn["observation"] for turn in row["turns"])
