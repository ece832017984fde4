"""Check that each promotion decision follows from its evaluations, and that the alias is where the
decisions put it.

The evaluations behind a decision are audited like a run's own: each is played, rendered and scored
again under the weights of the version that it measured.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from agentgym.audit.episodes import check_replay, check_tokens
from agentgym.audit.findings import Checks
from agentgym.audit.ledger import existing_ledger
from agentgym.audit.sampling import check_sampling
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.gate import Evidence, judged_again
from agentgym.evaluation.history import (
    DECISION,
    FOLDER,
    RECORD,
    Entry,
    History,
    HistoryElsewhere,
    Version,
    artifact,
    summary,
)
from agentgym.evaluation.paired import align
from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol, owned_protocol
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.evaluation.registry import Promotions
from agentgym.evaluation.result import Result
from agentgym.evaluation.stored import plan_of, stored_result
from agentgym.pipeline.table import open_store, steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.mlflow import local_path
from agentgym.tracking.reaching import has_file, reaching
from agentgym.tracking.registry import alias_version, all_models, version_run, version_tags

Draws = tuple[int | None, int | None, int]  # episodes to play again, to score again; seed
WEIGHTS = "weights"  # the parent under which an evaluation's record has the version's checkpoint


def check_decisions(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> list[tuple[RunStore, Entry]]:
    """Check every decision about the run's alias, the decision that the run itself recorded, the
    version that has the alias now, and the versions' tags.

    If another store decides about the alias, the history in this store is checked as well.
    Result: (store with the evidence, decision) of the decision on this run's model and of the last
    one that moved the alias, if the gate made them. Empty if the run registered no model or MLflow
    lacks its experiment. key: the run's key.
    """
    registration = next((record for record in steps if record.step.kind is Kind.REGISTER), None)
    tracker = existing_ledger(cfg)
    if registration is None or registration.final is None or tracker is None:
        return []
    registered = registration.final.results
    promotions = Promotions(store, tracker, str(registered["model"]), str(registered["alias"]))
    deciding = None
    with contextlib.suppress(HistoryElsewhere):
        deciding = promotions.history
    both = (deciding, promotions.own)
    histories = {history.began: history for history in both if history and history.began}
    entries = {began: _history(history, checks) for began, history in histories.items()}
    for began, history in histories.items():
        _check_history(promotions, history, entries[began], checks)
    every = [entry for of_history in entries.values() for entry in of_history]
    decided = next((entry for entry in every if entry.asked == registration.key), None)
    if decided is not None:
        checks.expect("register", "decision on the alias", summary(decided), registered["champion"])
        if decided.kind == "judged":
            rules = json.loads(json.dumps(cfg.gate.model_dump(mode="json")))
            checks.expect("register", "rules of its gate", rules, decided.decision["settings"])
    elif registered["champion"]["moved"] or registered["champion"]["rules"]:
        checks.fail("register: its decision is not in the history of the alias")
    last = next((entry for entry in reversed(every) if entry.moved), None)
    judged = [
        (promotions.evidence_store(entry.decision) or store, entry)
        for entry in {id(entry): entry for entry in (decided, last) if entry is not None}.values()
        if entry.kind == "judged"
    ]
    if deciding is None or not deciding.began or deciding.is_owed:
        why = "its history cannot be reached, or its last decision is under way"
        checks.skip(f"who holds {promotions.alias}", why)
        return judged
    drift = promotions.standing(entries[deciding.began]).drift
    checks.counted += 1
    if drift:
        checks.fail(drift)
    _check_tags(promotions, every, checks)
    return judged


def misplaced_aliases(cfg: RunConfig) -> list[str]:
    """Return one line for each registered model whose alias is misplaced: a decision took it to a
    version evaluated on other environments, items or settings than the version that had it, and it
    was not moved by hand since. Only earlier releases decided so.

    The configured model also gets a line if its alias is on a version of other environments than
    the run's. A model whose history cannot be reached from here is skipped. Empty if MLflow's
    database file is missing.
    Errors: LedgerUnavailable if MLflow cannot be used.
    """
    file = Path(cfg.tracking_uri.removeprefix("sqlite:///"))
    if has_file(cfg) and not file.is_file():
        return []
    lines, alias = [], cfg.registry.alias
    with reaching(cfg.tracking_uri):
        tracker = tracker_of(cfg)
        for name in all_models(tracker):
            promotions = Promotions(open_store(cfg), tracker, name, alias)
            number = alias_version(tracker, name, alias)
            if number is None:
                continue
            # the history is in a store out of reach; a machine that reaches it reports the alias
            with contextlib.suppress(HistoryElsewhere):
                line = promotions.misplaced()
                if not line and name == cfg.registered_model:
                    line = _other_environments(cfg, promotions, number)
                lines += [line] if line else []
    return lines


def _other_environments(cfg: RunConfig, promotions: Promotions, number: str) -> str:
    """Return the error text if the alias is on a version of other environments than the run's.

    Empty if the environments are the same or unknown. number: the version that has the alias.
    """
    question = promotions.question(promotions.version(number))
    if question is None or question.envs.keys() == {env.name for env in cfg.envs}:
        return ""
    return (
        f"{promotions.model}@{promotions.alias} is version {number} of {question.env_names}, and"
        f" this run's environments are {cfg.env_names}: set registry.model_name, or make one of"
        " these count with `agentgym promote VERSION --force --why ...`"
    )


def _check_history(
    promotions: Promotions, history: History, entries: Sequence[Entry], checks: Checks
) -> None:
    """Check each decision on an alias. Check also that the version that had the alias before a
    decision is the one that had it after the previous decision. `checks` gets the outcomes.
    """
    for entry in entries:
        with checks.guard(f"decision {entry.number}"):
            evidence_store = promotions.evidence_store(entry.decision)
            candidates = promotions.own.store, history.store, evidence_store
            stores = [store for store in candidates if store is not None]
            _check_entry(stores, evidence_store is not None, entry, checks)
            _check_shown(promotions, history, entry, checks)
    for before, after in pairwise(entries):
        same = after.before is None if before.after is None else before.after.is_same(after.before)
        checks.expect(f"decision {after.number}", "who held the alias before", True, same)


def _history(history: History, checks: Checks) -> list[Entry]:
    """Return the readable entries of a history. Check that each commit names the previous one and
    that no entry is missing; an unreadable entry is a failure.
    """
    before, entries = "", []
    for commit in history.commits():
        where = f"promotions commit {commit.seq}"
        checks.expect(where, "records digest of the commit before", before, commit.follows)
        before = commit.records_digest
        if RECORD in commit.records:
            with checks.guard(where):
                entries.append(history.entry(commit))
                checks.expect(where, "number of the entry", len(entries), entries[-1].number)
    return entries


def _check_entry(
    stores: Sequence[RunStore], must_be_there: bool, entry: Entry, checks: Checks
) -> None:
    """Check that a decision of the gate follows from its evidence, and the evidence from
    evaluations in `stores`. Decisions made otherwise, for example by hand, are not checked.
    must_be_there: an evaluation that none of `stores` has is a failure; False: it is skipped. One
    that `agentgym gc` collected is always skipped.
    """
    where = f"decision {entry.number} on version {entry.candidate.number}"
    if entry.kind != "judged":
        return
    again = json.loads(json.dumps(judged_again(entry.decision)))
    checks.expect(where, "what its evidence comes to", again, dict(entry.decision))
    checks.expect(where, "its reason", again["why"], entry.why)
    moves = entry.verdict == "PROMOTE"
    holder = entry.candidate if moves else entry.before
    checks.expect(where, "who holds the alias after it", holder, entry.after)
    evidence = Evidence.from_json(entry.decision["evidence"])
    if moves:
        checks.expect(where, "evidence that moved the alias", True, bool(evidence.pairs))
    for version, side, question in (
        (entry.candidate, "after", evidence.questions[0]),
        (entry.before, "before", evidence.questions[1]),
    ):
        if version is None or not evidence.pairs:
            continue
        what = f"evaluation of version {version.number} in decision {entry.number}"
        results = (_result(store, version, question, entry.candidate) for store in stores)
        result = next((stored for stored in results if stored is not None), None)
        if result is None:
            ran = version.evaluation
            if ran and any(store.is_collected(ran["step"], ran["key"]) for store in stores):
                checks.skip(what, "it was collected by `agentgym gc`")
            elif must_be_there:
                checks.fail(f"{where}: {what} is in no store")
            else:
                why = "it is in a store that cannot be looked at from here"
                checks.skip(what, why, weighs=True)
            continue
        pairs = align(result, result)
        for env, pair in evidence.pairs.items():
            outcomes = getattr(pair, side)
            same = env in pairs and np.array_equal(pairs[env].after, outcomes, equal_nan=True)
            what = f"{env}: outcomes of version {version.number}"
            checks.expect(where, f"{what} as its evaluation has them", True, same)


def _result(store: RunStore, version: Version, question: str, candidate: Version) -> Result | None:
    """Return a version's stored result: the one of `agentgym evaluate` under the key `question`, if
    that is a key (64 hex digits), else the one of the run that trained it. None if it is missing.

    A run's result counts only in a store that also has the candidate's: the gate's store has both.
    """
    anew = store.final(EVALUATION, question) if len(question) == 64 else None
    if anew is not None:
        return stored_result(store, anew)
    final = version.evaluation_in(store)
    if final is None or candidate.evaluation_in(store) is None:
        return None
    return stored_result(store, final)


def _check_shown(promotions: Promotions, history: History, entry: Entry, checks: Checks) -> None:
    """Check that MLflow's file of the decision equals the history's entry. Skip the check if the
    file or the candidate is missing, or the artifacts are on another machine.
    """
    number = promotions.number_of(entry.candidate)
    folder = _artifacts(promotions, number) if number else None
    if folder is None:
        why = "its model is gone, or its artifacts are remote"
        checks.skip(f"decision {entry.number} in MLflow", why)
        return
    path, earlier = folder / artifact(history, entry), folder / FOLDER / f"{entry.number:04d}.json"
    if not path.is_file() and earlier.is_file() and not _is_anothers(earlier, [entry]):
        path = earlier
    if not path.is_file():
        checks.skip(f"decision {entry.number} in MLflow", "the registry was made anew")
        return
    where = f"decision {entry.number}"
    checks.expect(where, "as MLflow has it", entry.to_bytes(), path.read_bytes())


def _artifacts(promotions: Promotions, number: str) -> Path | None:
    """Folder of the artifacts of a version's MLflow run; None if it is remote or has no run."""
    run_id = version_run(promotions.tracker, promotions.model, number)
    location = promotions.tracker.client.get_run(run_id).info.artifact_uri if run_id else ""
    return local_path(location)


def _is_anothers(path: Path, entries: Sequence[Entry]) -> bool:
    """Return True if a file has a decision that was made at another time than all of `entries`;
    False also for an unreadable file.

    Earlier releases wrote the histories of several stores to one folder, so one could overwrite
    another.
    """
    try:
        decision = Entry.from_bytes(path.read_bytes())
    except (ValueError, KeyError, TypeError):
        return False
    return all(decision.at != entry.at for entry in entries)


def _check_tags(promotions: Promotions, entries: Sequence[Entry], checks: Checks) -> None:
    """Check that the history has the decision whose digest is in each version's tag.

    If it is missing, the history was cut off at its end. Versions without this tag are passed over;
    a tag that an earlier release wrote for another store is skipped.
    """
    known = {sha256(entry.to_bytes()) for entry in entries}
    for number in dict.fromkeys(entry.candidate.number for entry in entries):
        try:
            tags = version_tags(promotions.tracker, promotions.model, number)
        except LookupError:
            continue
        if DECISION not in tags:
            continue
        folder = _artifacts(promotions, number)
        files = (folder / FOLDER).glob("*.json") if folder else ()
        others = {sha256(path.read_bytes()) for path in files if _is_anothers(path, entries)}
        if tags[DECISION] in others:
            checks.skip(f"tag of version {number}", "an earlier release wrote it for another store")
            continue
        where = f"{promotions.model} version {number}"
        checks.expect(where, "its decision is in the history", True, tags[DECISION] in known)


def check_judged(
    cfg: RunConfig, store: RunStore, entry: Entry, draws: Draws, checks: Mapping[str, Checks]
) -> None:
    """Check the evaluations by the gate's protocol that a decision names: digest and settings,
    their episodes played again on new servers, tokens, log-probabilities and draws. Runs' own
    evaluations are left out; the last three are skipped if the weights are not in this store.

    checks: receive the results, by the names in CHECKS.
    """
    num_episodes, num_rescored, seed = draws
    evidence = Evidence.from_json(entry.decision["evidence"])
    for version, question in zip((entry.candidate, entry.before), evidence.questions, strict=True):
        final = store.final(EVALUATION, question) if len(question) == 64 else None
        if version is None or final is None:
            continue  # a run's own evaluation, or missing, which the decisions check reports
        where = f"evaluation {final.key[:12]} of version {version.number}"
        with checks["numbers"].guard(where):
            result = stored_result(store, final)
            checks["numbers"].expect(where, "its digest", final.key, result.digest)
            protocol = EvaluationProtocol.model_validate(result.about["settings"])
            settings_asked = json.loads(canonical_json(protocol.semantic()))
            settings_recorded = json.loads(canonical_json(result.identity["protocol"]))
            checks["numbers"].expect(where, "its settings", settings_asked, settings_recorded)
        weights = _weights(store, version)
        for record in _records(cfg, store, final, weights):
            instructions: dict[str, str] = {}
            with checks["replay"].guard(where):
                instructions = check_replay(
                    record.cfg, [record], num_episodes, seed, checks["replay"]
                )
            if weights is None:
                for name in ("tokens", "rescore", "sampling"):
                    weighs = version is entry.candidate
                    checks[name].skip(where, "its weights are not in this store", weighs=weighs)
                continue
            with checks["tokens"].guard(where):
                check_tokens(record, instructions, checks["tokens"])
            with checks["rescore"].guard(where):
                check_sampling(record, num_rescored, seed, checks["rescore"], checks["sampling"])


def _weights(store: RunStore, version: Version) -> Manifest | None:
    """Return a copy of the commit with a version's weights, its `global_step` set to 0. None if the
    store has no such commit.
    """
    head = next((head for head in store.heads() if head.digest == version.checkpoint), None)
    # an evaluation of a registered version counts no optimizer steps
    return head and head.model_copy(update={"state": {**head.state, "global_step": 0}})


def _records(
    cfg: RunConfig, store: RunStore, final: Manifest, weights: Manifest | None
) -> Iterator[StepRecord]:
    """Yield the evaluation's episodes as a step's record, whose configuration plays as it did, for
    each environment. final: last commit of the evaluation. weights: commit it measured, if any.
    """
    commits = store.history(final.step, final.key)
    protocol = owned_protocol(plan_of(store, commits).about["settings"], cfg.envs)
    episodes = {
        commit.seq: decode_trajectories(store.read(commit, TRAJECTORIES))
        for commit in commits
        if TRAJECTORIES in commit.records
    }
    parents = {WEIGHTS: weights} if weights is not None else {}
    evaluation = next(step for step in steps_of(cfg).values() if step.kind is Kind.EVALUATE)
    step = replace(
        evaluation, name=EVALUATION, title=EVALUATION, data="", baseline="", checkpoint=WEIGHTS
    )
    for settings in protocol.envs:
        playing = _settings_of(cfg, protocol, settings)
        record = StepRecord(playing, store, step, final.key, parents, commits)
        record.episodes = {
            seq: [episode for episode in logged if episode.item.env == settings.env.name]
            for seq, logged in episodes.items()
        }
        yield record


def _settings_of(cfg: RunConfig, protocol: EvaluationProtocol, settings: EnvProtocol) -> RunConfig:
    rollout = {
        "max_new_tokens": settings.max_new_tokens,
        "instructions": settings.instructions,
        "examples": settings.examples,
        "action_format": settings.action_format,
        "concurrency": protocol.concurrency,
        "max_attempts": settings.max_attempts,
    }
    evaluation = {"seed": protocol.seed, "max_turns": settings.max_turns}
    return cfg.model_copy(
        update={
            "env": settings.env,
            "mix": (),
            "rollout": cfg.rollout.model_copy(update=rollout),
            "model": cfg.model.model_copy(update={"context_tokens": settings.context_tokens}),
            "evaluation": cfg.evaluation.model_copy(update=evaluation),
        }
    )
