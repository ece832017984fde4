"""The lineage of registered models: their steps, data, source, evaluations and decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.history import Version, champion_of
from agentgym.evaluation.promotion import Promotions
from agentgym.evaluation.publish import promotions_of
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.evaluation.stored import is_evaluation
from agentgym.evaluation.version_files import told_of_files
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.tracking.inputs import LISTS
from agentgym.tracking.reaching import reaching
from agentgym.tracking.registry import all_versions, version_run_tags, version_tags

SHORT = 12
# tags of a version's run that identify the source code
SOURCE = ("mlflow.source.name", "mlflow.source.git.commit", "source.digest")


def lineage(cfg: RunConfig, of: str) -> dict[str, Any]:
    """Return the lineage of a version, or the versions whose lineage has a digest.

    of: the number of a version; empty: the one with the alias; else the beginning of a digest.
    Errors: ConfigError.
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
            tree = _of_version(promotions, heads, promotions.version(number))
            changed, files = told_of_files(promotions, number)
            return {**tree, "files": files, "changed": changed}
        return _back(promotions, heads, of)


def _of_version(
    promotions: Promotions, heads: Mapping[str, Manifest], version: Version
) -> dict[str, Any]:
    tags = version_tags(promotions.tracker, promotions.model, version.number)
    source = version_run_tags(promotions.tracker, promotions.model, version.number)
    checkpoint = heads.get(version.checkpoint)
    made_of = list(_ancestors(heads, version.checkpoint))
    return {
        "model": promotions.model,
        "version": version.number,
        "checkpoint": version.checkpoint,
        "run": f"r{version.run_key[:SHORT]}" if version.run_key else None,
        "in_store": checkpoint is not None,
        "steps": [_step(head) for head in made_of],
        "data": next((head.results["digest"] for head in made_of if LISTS in head.blobs), None),
        "source": {name: source[name] for name in SOURCE if name in source},
        "evaluations": [_step(head) for head in _evaluations(heads, version, tags)],
        "decisions": _decisions(promotions, version),
    }


def _back(promotions: Promotions, heads: Mapping[str, Manifest], of: str) -> dict[str, Any]:
    """Return every version whose lineage has a digest or key that starts with `of`.

    Errors: ConfigError if there is none.
    """
    versions = []
    for number in all_versions(promotions.tracker, promotions.model):
        version = promotions.version(number)
        tree = _of_version(promotions, heads, version)
        digests = [tree["checkpoint"], tree["data"] or "", version.run_key]
        for step in (*tree["steps"], *tree["evaluations"]):
            digests += [step["digest"], step["key"]]
        if any(digest.startswith(of) for digest in digests if digest):
            versions.append(tree)
    if not versions:
        raise ConfigError(f"{of} is in the lineage of no version of {promotions.model}")
    return {"of": of, "versions": versions}


def _ancestors(heads: Mapping[str, Manifest], digest: str) -> Iterator[Manifest]:
    """Yield the step with this commit and all its ancestors, each once, nearest first."""
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
    """Return the evaluations of a version, by its own run and by `agentgym evaluate`."""
    weights, evaluations = tags.get("weights.sha256"), []
    for head in heads.values():
        if head.step == EVALUATION:
            if weights and head.config["policy"].get("weights") == weights:
                evaluations.append(head)
        elif is_evaluation(head) and version.checkpoint in head.parents.values():
            evaluations.append(head)
    return evaluations


def _decisions(promotions: Promotions, version: Version) -> list[dict[str, Any]]:
    return [
        {
            "entry": entry.number,
            "at": entry.at,
            "as": "candidate" if entry.candidate.is_same(version) else "champion",
            "verdict": entry.verdict or entry.kind,
            "moved": entry.moved,
            "why": entry.why,
        }
        for entry in promotions.history.entries()
        if entry.candidate.is_same(version) or version.is_same(entry.before)
    ]


def _step(head: Manifest) -> dict[str, Any]:
    return {
        "step": head.step,
        "key": head.key,
        "digest": head.digest,
        "commit": head.seq,
        "at": head.created_at,
    }


def lines(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a lineage as text."""
    if "versions" in tree:
        yield f"{tree['of']} is in the lineage of:"
        for row in tree["versions"]:
            named = f"{row['model']} version {row['version']}"
            yield f"  {named}, checkpoint {row['checkpoint'][:SHORT]}"
        return
    yield f"{tree['model']} version {tree['version']} of run {tree['run'] or 'unknown'}"
    if not tree["in_store"]:
        yield f"  its checkpoint {tree['checkpoint'][:SHORT]} is not in this store"
    for part in ("steps", "evaluations"):
        yield f"{part}:"
        for row in tree[part]:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["at"]))
            yield f"  {row['step']:<24}{row['digest'][:SHORT]}  commit {row['commit']:<4}{day}"
    yield f"data: {(tree['data'] or 'unknown')[:SHORT]}"
    yield "source: " + (", ".join(f"{k} {v}" for k, v in tree["source"].items()) or "unknown")
    yield f"files: {tree['files']}"
    yield "decisions:"
    for row in tree["decisions"]:
        yield f"  {row['entry']:>3}  {row['verdict']:<12}as {row['as']}: {row['why']}"
