"""Whether the alias is where recorded decisions put it, and each decision follows from what was
played.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from agentgym.audit.ledger import existing_ledger
from agentgym.audit.report import Checks
from agentgym.audit.steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.evidence import result_of_step
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import RECORD, Entry, Version
from agentgym.evaluation.paired import align
from agentgym.evaluation.promotion import DECISION, Promotions, artifact, judged_again, summary
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.evaluation.result import RESULT, Result
from agentgym.steps.step import Kind
from agentgym.store.manifest import sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import local_path
from agentgym.tracking.registry import version_run, version_tags

MODULES = ("agentgym.evaluation.evaluate",)  # any: who played is no matter here


def check_decisions(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """The whole history of the run's alias, and what the run says of its own part in it."""
    record = next((each for each in steps if each.step.kind is Kind.REGISTER), None)
    tracker = existing_ledger(cfg)
    if record is None or record.final is None or tracker is None:
        return
    told = record.final.results
    promotions = Promotions(store, tracker, str(told["model"]), str(told["alias"]))
    entries = _history(promotions, checks)
    for entry in entries:
        with checks.guard(f"decision {entry.number}"):
            _check_entry(store, entry, checks)
            _check_shown(promotions, entry, checks)
    for before, after in pairwise(entries):
        same = after.before is None if before.after is None else before.after.is_same(after.before)
        checks.expect(f"decision {after.number}", "who held the alias before", True, same)
    own = next((each for each in entries if each.asked == record.key), None)
    if own is not None:
        checks.expect("register", "decision on the alias", summary(own), dict(told["champion"]))
    elif told["champion"]["moved"] or told["champion"]["rules"]:
        checks.fail("register: its decision is not in the history of the alias")
    if promotions.history.is_owed:
        checks.skipped += 1  # the last one was under way
        return
    drift = promotions.standing(entries).drift
    checks.counted += 1
    if drift:
        checks.fail(drift)
    _check_tags(promotions, entries, checks)


def _history(promotions: Promotions, checks: Checks) -> list[Entry]:
    """Its entries; that each commit names the one before, and none is missing."""
    before, entries = "", []
    for commit in promotions.history.commits():
        where = f"promotions commit {commit.seq}"
        checks.expect(where, "records digest of the commit before", before, commit.follows)
        before = commit.records_digest
        if RECORD in commit.records:
            with checks.guard(where):
                entries.append(promotions.history.entry(commit))
                checks.expect(where, "number of the entry", len(entries), entries[-1].number)
    return entries


def _check_entry(store: RunStore, entry: Entry, checks: Checks) -> None:
    """Judged again it comes to the same, by outcomes that are those of the evaluations."""
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
    for version, side, question in (
        (entry.candidate, "after", evidence.questions[0]),
        (entry.before, "before", evidence.questions[1]),
    ):
        if version is None or not evidence.pairs:
            continue
        result = _result(store, version, question)
        if result is None:
            checks.skipped += 1  # its episodes are in another store, or were collected
            continue
        pairs = align(result, result)
        for env, pair in evidence.pairs.items():
            mine = getattr(pair, side)
            same = env in pairs and np.array_equal(pairs[env].after, mine, equal_nan=True)
            what = f"{env}: outcomes of version {version.number}"
            checks.expect(where, f"{what} as its evaluation has them", True, same)


def _result(store: RunStore, version: Version, question: str) -> Result | None:
    """Of `agentgym evaluate`, or of the run that made the version."""
    anew = store.final(EVALUATION, question) if len(question) == 64 else None
    if anew is not None:
        return Result.from_bytes(store.read(anew, RESULT))
    told = version.evaluation
    final = store.final(told["step"], told["key"]) if told else None
    if final is None or final.digest != told["digest"]:
        return None
    return result_of_step(store, final, MODULES)


def _check_shown(promotions: Promotions, entry: Entry, checks: Checks) -> None:
    """MLflow has it as it is."""
    number = promotions.number_of(entry.candidate)
    run_id = version_run(promotions.tracker, promotions.model, number) if number else ""
    location = promotions.tracker.client.get_run(run_id).info.artifact_uri if run_id else ""
    folder = local_path(location)
    if folder is None:
        checks.skipped += 1  # its model is gone, or its artifacts are remote
        return
    path = folder / artifact(entry)
    if not path.is_file():
        checks.skipped += 1  # of a registry that was made anew
        return
    checks.expect(
        f"decision {entry.number}", "as MLflow has it", entry.to_bytes(), path.read_bytes()
    )


def _check_tags(promotions: Promotions, entries: Sequence[Entry], checks: Checks) -> None:
    """A version shows the last decision on it: one that the history lacks was cut off there."""
    known = {sha256(entry.to_bytes()) for entry in entries}
    for number in dict.fromkeys(entry.candidate.number for entry in entries):
        try:
            tags = version_tags(promotions.tracker, promotions.model, number)
        except LookupError:
            continue
        if DECISION in tags:
            where = f"{promotions.model} version {number}"
            checks.expect(where, "its decision is in the history", True, tags[DECISION] in known)
