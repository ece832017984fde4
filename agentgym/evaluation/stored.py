"""Results of stored evaluations, computed from their episodes; a recorded result must agree."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.config import EvaluationConfig
from agentgym.data.items import parse_item_id
from agentgym.evaluation.numbers import Table, numbers_of
from agentgym.evaluation.protocol import protocol_from
from agentgym.evaluation.record import PLAN, Plan, key_of, read_plan, replay
from agentgym.evaluation.result import CLOCK, RESULT, Result, ResultError, Slot, coverage_of
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore

# blob of a run's evaluation by an earlier release, which has no plan and no result
OUTCOMES = "outcomes.json"
TOLERANCE = 1e-9  # for numbers that another version of a library computed


class NumbersChanged(ValueError):
    """Error for a recorded evaluation that does not agree with its episodes."""


def is_evaluation(head: Manifest) -> bool:
    """Return True for a commit with the result of an evaluation, of a run or on its own."""
    return RESULT in head.blobs or OUTCOMES in head.blobs


def plan_of(store: RunStore, commits: Sequence[Manifest]) -> Plan:
    """Return the plan of an evaluation; one of an earlier release, which stored none, is rebuilt.
    commits: all of them, oldest first. Errors: ResultError if they are no evaluation.
    """
    if commits and PLAN in commits[0].records:
        return read_plan(store, commits[0])
    if commits and OUTCOMES in commits[-1].blobs:
        return _earlier_plan(store, commits[-1])
    key = commits[-1].key[:12] if commits else "(none)"
    raise ResultError(f"evaluation {key} has no plan; it is none of this version")


def played_slots(store: RunStore, plan: Plan, commits: Sequence[Manifest]) -> tuple[Slot, ...]:
    """Return the plan's slots as played in these commits.
    Errors: NumbersChanged for an unplanned episode; as `attempts_of`.
    """
    slots = {key_of(slot): slot for slot in plan.slots}
    try:
        replay(store, commits, slots)
    except KeyError as error:
        raise NumbersChanged(f"episodes of {error} were never asked for") from None
    return tuple(slots.values())


def stored_result(store: RunStore, head: Manifest) -> Result:
    """Return the result of an evaluation, finished or not, from its plan and its episodes.
    Errors: NumbersChanged if the recorded result differs; ResultError, BlobMissing, DigestMismatch,
    RecordError.
    """
    commits = store.history(head.step, head.key)
    plan = plan_of(store, commits)
    slots = played_slots(store, plan, commits)
    protocol = plan.protocol
    about: dict[str, Any] = {**plan.about, "valid": protocol.is_covered(coverage_of(slots))}
    clock: Mapping[str, Any] = {}
    where = f"{head.step} ({head.key[:12]})"
    if RESULT in head.blobs:
        recorded = Result.from_bytes(store.read(head, RESULT), store.read(head, CLOCK), where)
        clock = recorded.clock
        about |= {
            name: recorded.about[name] for name in ("notes", "cost") if name in recorded.about
        }
    result = Result(plan.identity, slots, numbers_of(slots, protocol), about, clock)
    if RESULT in head.blobs and (unlike := _unlike(recorded, result)):
        raise NumbersChanged(f"{where}: its result is not that of its episodes: {unlike}")
    if OUTCOMES in head.blobs:
        _compare_outcomes(where, json.loads(store.read(head, OUTCOMES)), slots)
    return result


def _unlike(recorded: Result, result: Result) -> str:
    """Return how a recorded result differs from the computed one; empty: it does not.
    Lists, and numbers that only one of the two has (of another version), are not compared.
    """
    if recorded.identity != result.identity:
        return "it names another question"
    for ours, theirs in zip(result.slots, recorded.slots, strict=False):
        if ours != theirs:
            return f"{ours.item_id} sample {ours.sample}"
    if len(recorded.slots) != len(result.slots):
        return f"{len(recorded.slots)} slots, {len(result.slots)} were asked for"
    return _unlike_numbers(recorded.numbers, json.loads(json.dumps(result.numbers)), "")


def _unlike_numbers(recorded: Any, ours: Any, path: str) -> str:
    if isinstance(recorded, Mapping) and isinstance(ours, Mapping):
        names = recorded.keys() & ours
        unlike = (_unlike_numbers(recorded[name], ours[name], f"{path} {name}") for name in names)
        return next(filter(None, unlike), "")
    if isinstance(recorded, float | int) and isinstance(ours, float | int):
        same = math.isclose(recorded, ours, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    else:
        same = recorded == ours or isinstance(recorded, list)
    return "" if same else f"{path.strip()} is {ours}, on record {recorded}"


def _earlier_plan(store: RunStore, final: Manifest) -> Plan:
    """Rebuild the plan of a run's evaluation from its last commit: earlier releases stored none."""
    settings = EvaluationConfig.model_validate(final.config["evaluation"])
    ids = [str(item_id) for item_id in json.loads(store.read(final, OUTCOMES))["items"]]
    envs = dict.fromkeys(parse_item_id(item_id)[0] for item_id in ids)
    slots = tuple(
        Slot(env, item_id, sample)
        for env in envs
        for item_id in ids
        if parse_item_id(item_id)[0] == env
        for sample in range(settings.num_samples + 1)
    )
    rest = {**settings.model_dump(include={"num_samples", "max_turns"}), "greedy": True}
    tree = settings.model_dump(include={"confidence", "min_coverage"})
    protocol = protocol_from({**tree, "envs": [{**rest, "env": {"name": env}} for env in envs]}, {})
    name = str(final.results["checkpoint"])
    about = {
        "policy": name,
        "protocol": f"evaluation of {' + '.join(envs)}",
        "settings": protocol.model_dump(mode="json"),
    }
    identity = {
        "policy": {"checkpoint": final.parents[name]},
        "settings": dict(final.config),
        "items": sha256(canonical_json(ids)),
        "harness": f"an earlier one, of {final.key[:12]}",  # the key covers its source
    }
    return Plan(slots, about, identity)


def _compare_outcomes(where: str, outcomes: Mapping[str, Any], slots: Sequence[Slot]) -> None:
    """Raise NumbersChanged if recorded outcomes differ from those of the slots."""
    for env in dict.fromkeys(slot.env for slot in slots):
        table = Table.of([slot for slot in slots if slot.env == env])
        rows = [outcomes["items"].index(item_id) for item_id in table.items]
        for name, success in (("greedy", table.greedy), ("samples", table.samples)):
            recorded = np.array(outcomes[name], dtype=float)[rows]
            if not np.array_equal(recorded, success, equal_nan=True):
                raise NumbersChanged(f"{where}: its outcomes are not those of its episodes")
