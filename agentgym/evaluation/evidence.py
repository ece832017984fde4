"""What the gate judges by: a run's own evaluation as a result, and two results as evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.data.items import parse_item_id
from agentgym.evaluation.evaluate import outcomes as outcome_tables
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import Version
from agentgym.evaluation.paired import Incomparable, Pair, align
from agentgym.evaluation.result import Result, Slot
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.context import OUTCOMES
from agentgym.store.keys import source_digest, step_key
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import BlobMissing, DigestMismatch, RunStore
from agentgym.tracking.deliver import committed_points
from agentgym.types import Item, Trajectory

# of an evaluation's settings, those that no episode depends on
TOLD = ("k", "confidence", "min_coverage")
KL = "actor/reference_kl"
# a model's name in the registry and its version -> its result by the gate's protocol
PlayAnew = Callable[[str], Result]


class NumbersChanged(ValueError):
    """An evaluation says something else than its episodes."""


def result_of_step(store: RunStore, manifest: Manifest, modules: Sequence[str]) -> Result:
    """A run's own evaluation, made of its episodes as `agentgym evaluate` makes one.

    modules: whose source plays such evaluations here; one that another source played answers
    another question.
    Errors: NumbersChanged where its outcomes are not those of its episodes; BlobMissing,
    DigestMismatch, RecordError.
    """
    settings = dict(manifest.config["evaluation"])
    listed = json.loads(store.read(manifest, OUTCOMES))
    items = [Item(*parse_item_id(each), settings["split"]) for each in listed["items"]]
    played = _episodes(store, manifest)
    tables = outcome_tables(played, items, settings["num_samples"])
    for name, table in zip(("greedy", "samples"), tables, strict=True):
        if not np.array_equal(np.array(listed[name], dtype=float), table, equal_nan=True):
            raise NumbersChanged(
                f"{manifest.step} ({manifest.key[:12]}): its outcomes are not those of its episodes"
            )
    slots = {
        (item.item_id, sample): Slot(item.env, item.item_id, sample)
        for env in dict.fromkeys(item.env for item in items)
        for item in items
        if item.env == env
        for sample in range(settings["num_samples"] + 1)
    }
    for trajectory in played:
        key = (trajectory.item.item_id, trajectory.sample)
        slots[key] = slots[key].played(trajectory)
    return Result(_identity(manifest, listed["items"], modules), tuple(slots.values()))


def _episodes(store: RunStore, manifest: Manifest) -> list[Trajectory]:
    return [
        trajectory
        for commit in store.history(manifest.step, manifest.key)
        if TRAJECTORIES in commit.records
        for trajectory in decode_trajectories(store.read(commit, TRAJECTORIES))
    ]


def _identity(manifest: Manifest, items: Sequence[str], modules: Sequence[str]) -> dict[str, Any]:
    """What was asked; `policy` is who answered."""
    config = {**manifest.config, "evaluation": dict(manifest.config["evaluation"])}
    for name in TOLD:
        config["evaluation"].pop(name, None)
    source = source_digest(modules)
    ours = step_key(
        manifest.step, config=manifest.config, inputs=dict(manifest.parents), source=source
    )
    return {
        "policy": {"checkpoint": manifest.parents[str(manifest.results["checkpoint"])]},
        "settings": config,
        "items": sha256(canonical_json(list(items))),
        "harness": source if ours == manifest.key else f"another one's, of {manifest.key[:12]}",
    }


def floor_evidence(
    outcomes: Mapping[str, Any], families: Sequence[str | None], digest: str
) -> Evidence:
    """Of a first champion: the outcomes that its evaluation stored, and each item's family.
    digest: of that.
    """
    ids = [str(each) for each in outcomes["items"]]
    table = np.array(outcomes["samples"], dtype=float)
    envs = [parse_item_id(each)[0] for each in ids]
    pairs = {}
    for env in dict.fromkeys(envs):
        rows = [row for row, name in enumerate(envs) if name == env]
        own, told = table[rows], tuple(families[row] for row in rows)
        none = np.full_like(own, np.nan)
        pairs[env] = Pair(tuple(ids[row] for row in rows), told, none, own, own.size)
    return Evidence(pairs, False, (float(1 - np.isnan(table).mean()), 1.0), (digest, ""))


def first_evidence(result: Result) -> Evidence:
    """Of a first champion that was played by the gate's protocol."""
    pairs = align(result, result)
    alone = {
        env: Pair(p.items, p.families, np.full_like(p.after, np.nan), p.after, p.num_slots)
        for env, p in pairs.items()
    }
    return Evidence(alone, False, (result.coverage, 1.0), (result.digest, ""))


def paired_evidence(champion: Result, candidate: Result, seen: Collection[str]) -> Evidence:
    """seen: ids of the items that the candidate was trained or chosen on.
    Errors: Incomparable.
    """
    pairs = align(champion, candidate)
    items = {item for pair in pairs.values() for item in pair.items}
    return Evidence(
        pairs,
        True,
        (candidate.coverage, champion.coverage),
        (candidate.digest, champion.digest),
        (_tokens(candidate), _tokens(champion)),
        num_seen=len(items & set(seen)),
    )


def incomparable(why: str) -> Evidence:
    """Where there is nothing to pair."""
    return Evidence({}, True, obstacle=why)


def _tokens(result: Result) -> float | None:
    """Said in an episode, on average."""
    said = [slot.usage.output_tokens for slot in result.slots if slot.counts]
    return float(np.mean(said)) if any(said) else None


def own_results(
    store: RunStore, evaluation: Manifest, champion: Version, modules: Sequence[str]
) -> tuple[Result, Result]:
    """Champion's and candidate's result, where both runs' own evaluations asked the same.
    Errors: Incomparable where they did not, or the champion's is not in this store;
    NumbersChanged.
    """
    ours = result_of_step(store, evaluation, modules)
    theirs = _stored(store, champion)
    if theirs is None:
        raise Incomparable(f"the evaluation of version {champion.number} is not in this store")
    try:
        result = result_of_step(store, theirs, modules)
    except (BlobMissing, DigestMismatch, NumbersChanged, KeyError) as error:
        raise Incomparable(f"the evaluation of version {champion.number}: {error}") from None
    align(result, ours)
    return result, ours


def _stored(store: RunStore, version: Version) -> Manifest | None:
    told = version.evaluation
    if not told:
        return None
    final = store.final(told["step"], told["key"])
    return final if final is not None and final.digest == told["digest"] else None


def reference_kl(store: RunStore, checkpoint: Manifest) -> float | None:
    """The last one that training measured; None: none was."""
    points = committed_points(store, checkpoint.step, checkpoint.key)
    return next((p.metrics[KL] for p in reversed(points) if KL in p.metrics), None)
