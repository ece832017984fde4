"""What a registered model was made of and judged by, and which models a thing is in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.history import Version, champion_of
from agentgym.evaluation.promotion import Promotions
from agentgym.evaluation.publish import promotions_of
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.evaluation.registered import told_of_files
from agentgym.evaluation.stored import is_evaluation
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.tracking.inputs import LISTS
from agentgym.tracking.mlflow import reaching
from agentgym.tracking.registry import (
    all_versions,
    version_run_tags,
    version_tags,
)

SHORT = 12
# tags of a version, or of its run, that say which source made it
SOURCE = ("mlflow.source.name", "mlflow.source.git.commit", "source.digest")


def lineage(cfg: RunConfig, of: str) -> dict[str, Any]:
    """Of a version by its number (empty: the one that holds the alias), all it was made of; of
    the beginning of a digest, the versions it is in. Errors: ConfigError.
    """
    store = open_store(cfg)
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, store)
        heads = {head.digest: head for head in store.heads()}
        if not of or (of.isdigit() and len(of) < 6):
            champion = champion_of(promotions.history.entries())
            number = of or (promotions.number_of(champion) if champion else None)
            if number is None:
                raise ConfigError(
                    f"no version of {promotions.model} holds {promotions.alias}; name one"
                )
            found = _of_version(promotions, heads, promotions.version(number))
            changed, files = told_of_files(promotions, number)
            return {**found, "files": files, "changed": changed}
        return _back(promotions, heads, of)


def _of_version(
    promotions: Promotions, heads: Mapping[str, Manifest], version: Version
) -> dict[str, Any]:
    tags = version_tags(promotions.tracker, promotions.model, version.number)
    checkpoint = heads.get(version.checkpoint)
    made_of = list(_ancestors(heads, version.checkpoint))
    return {
        "model": promotions.model,
        "version": version.number,
        "checkpoint": version.checkpoint,
        "run": f"r{version.run_key[:SHORT]}" if version.run_key else None,
        "in_store": checkpoint is not None,
        "steps": [_step(each) for each in made_of],
        "data": next((e.results["digest"] for e in made_of if LISTS in e.blobs), None),
        "source": _source(promotions, version),
        "evaluations": [_step(each) for each in _evaluations(heads, version, tags)],
        "decisions": _decisions(promotions, version),
    }


def _back(promotions: Promotions, heads: Mapping[str, Manifest], of: str) -> dict[str, Any]:
    """Every version whose lineage names a digest that begins so."""
    found = []
    for number in all_versions(promotions.tracker, promotions.model):
        version = promotions.version(number)
        own = _of_version(promotions, heads, version)
        digests = [own["checkpoint"], own["data"] or "", version.run_key]
        for each in (*own["steps"], *own["evaluations"]):
            digests += [each["digest"], each["key"]]
        if any(digest.startswith(of) for digest in digests if digest):
            found.append(own)
    if not found:
        raise ConfigError(f"{of} is in the lineage of no version of {promotions.model}")
    return {"of": of, "versions": found}


def _ancestors(heads: Mapping[str, Manifest], digest: str) -> Iterator[Manifest]:
    """The step whose commit this is and all it builds on, each once, the nearest first."""
    waiting, seen = [digest], set()
    while waiting:
        head = heads.get(waiting.pop(0))
        if head is None or head.digest in seen:
            continue
        seen.add(head.digest)
        yield head
        waiting += head.parents.values()


def _evaluations(
    heads: Mapping[str, Manifest], version: Version, tags: Mapping[str, str]
) -> list[Manifest]:
    """Its run's own ones, and those of `agentgym evaluate`."""
    weights, found = tags.get("weights.sha256"), []
    for head in heads.values():
        if head.step == EVALUATION:
            if weights and head.config["policy"].get("weights") == weights:
                found.append(head)
        elif is_evaluation(head) and version.checkpoint in head.parents.values():
            found.append(head)
    return found


def _decisions(promotions: Promotions, version: Version) -> list[dict[str, Any]]:
    return [
        {
            "entry": each.number,
            "at": each.at,
            "as": "candidate" if each.candidate.is_same(version) else "champion",
            "verdict": each.verdict or each.kind,
            "moved": each.moved,
            "why": each.why,
        }
        for each in promotions.history.entries()
        if each.candidate.is_same(version) or version.is_same(each.before)
    ]


def _source(promotions: Promotions, version: Version) -> dict[str, str]:
    tags = version_run_tags(promotions.tracker, promotions.model, version.number)
    return {name: tags[name] for name in SOURCE if name in tags}


def _step(head: Manifest) -> dict[str, Any]:
    return {
        "step": head.step,
        "key": head.key,
        "digest": head.digest,
        "commit": head.seq,
        "at": head.created_at,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if "versions" in found:
        yield f"{found['of']} is in the lineage of:"
        for each in found["versions"]:
            named = f"{each['model']} version {each['version']}"
            yield f"  {named}, checkpoint {each['checkpoint'][:SHORT]}"
        return
    yield f"{found['model']} version {found['version']} of run {found['run'] or 'unknown'}"
    if not found["in_store"]:
        yield f"  its checkpoint {found['checkpoint'][:SHORT]} is not in this store"
    for part in ("steps", "evaluations"):
        yield f"{part}:"
        for each in found[part]:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["at"]))
            yield f"  {each['step']:<24}{each['digest'][:SHORT]}  commit {each['commit']:<4}{day}"
    yield f"data: {(found['data'] or 'unknown')[:SHORT]}"
    yield "source: " + (", ".join(f"{k} {v}" for k, v in found["source"].items()) or "not told")
    yield f"files: {found['files']}"
    yield "decisions:"
    for each in found["decisions"]:
        yield f"  {each['entry']:>3}  {each['verdict']:<12}as {each['as']}: {each['why']}"
