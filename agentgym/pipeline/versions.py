"""Registered versions: promotion, with the evaluations that the gate needs, and lineage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.data.check import load_data
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import Entry, Version, champion_of
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.publish import PlayAnew, evidence_of, promotions_of
from agentgym.evaluation.question import question_asked
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.evaluation.registry import Promotions, Standing, told_of_files
from agentgym.evaluation.result import Result
from agentgym.evaluation.stored import is_evaluation
from agentgym.pipeline.stored_config import audit_for_gate
from agentgym.pipeline.table import open_store, semantic_of, steps_of
from agentgym.steps.context import Progress
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.tracking.reaching import reaching
from agentgym.tracking.registry import all_versions, version_run_tags, version_tags
from agentgym.tracking.step_data import LISTS

SHORT = 12
# tags of a version's run that identify the source code
SOURCE = ("mlflow.source.name", "mlflow.source.git.commit", "source.digest")


def play_anew(cfg: RunConfig, progress: Progress | None = None) -> PlayAnew:
    """Return a function that evaluates a policy by the gate's protocol.

    Stored evaluations are not played again. It raises RuntimeError for one that stops early.
    """

    def play(policy: str) -> Result:
        from agentgym.pipeline.policy_evaluation import evaluate_policy

        request = EvaluationRequest.model_validate(
            {"policy": policy, "protocol": cfg.gate.protocol}
        )
        evaluated = evaluate_policy(cfg, request, progress)
        if evaluated.stopped:
            raise RuntimeError(f"the evaluation of {policy} stopped: {evaluated.stopped}")
        return evaluated.result

    return play


def promote(cfg: RunConfig, number: str, progress: Progress | None = None) -> Entry:
    """Let the gate judge a registered version, record its decision, return it, and move the alias
    if the gate promotes. Missing evaluations are played first; `gate.require_audit` also runs an
    audit.

    A repeated call with the same settings and data returns the recorded decision, until the alias
    moves or an audit has another result. If the version already has the alias, nothing is recorded.
    Errors: ConfigError, LedgerUnavailable; LeaseHeld if another process keeps the history or the
    evaluation locked; RuntimeError if an evaluation stops early or the champion keeps changing.
    """
    store, splits = open_store(cfg), load_data(cfg)
    chosen_on = {item.item_id for item in (*splits.train, *splits.validation)}
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, store)
        candidate = promotions.version(number)
        audit = audit_for_gate(cfg, candidate.run_key)

        def evidence_for(champion: Version | None) -> Evidence:
            final, play = candidate.evaluation_in(store), play_anew(cfg, progress)
            evidence = evidence_of(cfg, store, final, candidate, champion, play)
            items = {item for pair in evidence.pairs.values() for item in pair.items}
            evidence = replace(evidence, num_seen=len(items & chosen_on))
            return evidence if evidence.audit == "failed" else replace(evidence, **audit)

        moves = sum(entry.moved for entry in promotions.history.entries())
        # all of the run's evaluation steps have the same protocol
        step = next(step for step in steps_of(cfg).values() if step.kind is Kind.EVALUATE)
        question = question_asked(semantic_of(step, cfg), splits)
        what = [
            *("promote", number, candidate.checkpoint, cfg.gate.semantic(), dict(audit), moves),
            question.to_json(),
        ]
        return promotions.consider(
            candidate, cfg.gate, evidence_for, sha256(canonical_json(what)), question=question
        )


def force(cfg: RunConfig, number: str, why: str) -> Entry:
    """Move the alias without the gate and record a person's reason.
    Errors: ConfigError, also without a reason.
    """
    if not why.strip():
        raise ConfigError("--force needs --why: the history records why the gate was passed over")
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, open_store(cfg))
        return promotions.force(promotions.version(number), why)


def roll_back(cfg: RunConfig, to: str | None, why: str) -> Entry:
    """Move the alias to `to` (None: its last holder before) and record why. Errors: ConfigError."""
    with reaching(cfg.tracking_uri):
        return promotions_of(cfg, open_store(cfg)).roll_back(to, why)


def standing(cfg: RunConfig) -> tuple[list[Entry], Standing]:
    """Return the history, and the holder of the alias according to it and to MLflow."""
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, open_store(cfg))
        entries = promotions.history.entries()
        return entries, promotions.standing(entries)


def champion_files(cfg: RunConfig, now: Standing) -> tuple[bool, str]:
    """Compare the files of the version that has the alias with those that were registered.
    now: from `standing`.

    Result: (True if they were changed or are gone, a line to print); (False, "") without a version.
    """
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, open_store(cfg))
        number = promotions.number_of(now.champion) if now.champion else None
        changed, line = told_of_files(promotions, number) if number else (False, "")
    return changed, f"version {number}: {line}" if line and not changed else line


def lineage(cfg: RunConfig, of: str) -> dict[str, Any]:
    """Return the lineage of a version, or the versions whose lineage has a digest, for `lines`.

    of: the number of a version; empty: the one with the alias; else the beginning of a digest.
    Errors: ConfigError if there is no such version.
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
                    f"no version of {promotions.model} holds {promotions.alias}; give a number"
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
    made_of = list(ancestors(heads, version.checkpoint))
    return {
        "model": promotions.model,
        "version": version.number,
        "checkpoint": version.checkpoint,
        "run": f"r{version.run_key[:SHORT]}" if version.run_key else None,
        "in_store": version.checkpoint in heads,
        "steps": [{**step_of(head), "at": head.created_at} for head in made_of],
        "data": data_of(made_of),
        "source": {name: source[name] for name in SOURCE if name in source},
        "evaluations": [
            {**step_of(head), "at": head.created_at}
            for head in evaluations_of(heads, version.checkpoint, tags.get("weights.sha256"))
        ],
        "decisions": [
            {"entry": entry.number, "at": entry.at, **decision_of(entry, version)}
            for entry in decisions_on(promotions.history.entries(), version)
        ],
    }


def _back(promotions: Promotions, heads: Mapping[str, Manifest], of: str) -> dict[str, Any]:
    """Return `of` and the `versions` with a digest or key in their lineage that begins with it.
    Errors: ConfigError if there are none.
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


def ancestors(heads: Mapping[str, Manifest], digest: str) -> Iterator[Manifest]:
    """Yield the step with this commit and all its ancestors, each once, nearest first."""
    waiting, seen = [digest], set()
    while waiting:
        head = heads.get(waiting.pop(0))
        if head is None or head.digest in seen:
            continue
        seen.add(head.digest)
        yield head
        waiting += head.parents.values()


def data_of(steps: Iterable[Manifest]) -> str | None:
    """Return the digest of the data that the first of these steps with item lists has read."""
    return next((str(head.results["digest"]) for head in steps if LISTS in head.blobs), None)


def evaluations_of(
    heads: Mapping[str, Manifest], checkpoint: str, weights: str | None
) -> list[Manifest]:
    """Return the evaluations of a commit's weights, by its own run and by `agentgym evaluate`.
    checkpoint: the commit's digest; weights: that of its policy, None: not known.
    """
    evaluations = []
    for head in heads.values():
        if head.step == EVALUATION:
            if weights and head.config["policy"].get("weights") == weights:
                evaluations.append(head)
        elif is_evaluation(head) and checkpoint in head.parents.values():
            evaluations.append(head)
    return evaluations


def decisions_on(entries: Iterable[Entry], version: Version) -> list[Entry]:
    """Return the entries that judge a version, or another one against it."""
    return [
        entry
        for entry in entries
        if entry.candidate.is_same(version) or version.is_same(entry.before)
    ]


def decision_of(entry: Entry, version: Version) -> dict[str, Any]:
    """Return an entry of `decisions_on` in JSON types, without its time."""
    return {
        "as": "candidate" if entry.candidate.is_same(version) else "champion",
        "verdict": entry.verdict or entry.kind,
        "moved": entry.moved,
        "why": entry.why,
    }


def step_of(head: Manifest) -> dict[str, Any]:
    """Return the identity of a step's commit in JSON types, without its time."""
    return {"step": head.step, "key": head.key, "digest": head.digest, "commit": head.seq}


def lines(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result of `lineage` as lines of text."""
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
