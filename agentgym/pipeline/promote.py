"""Promotion of registered versions, and the evaluations that the gate needs for it."""

from __future__ import annotations

from dataclasses import replace

from agentgym.config import ConfigError, RunConfig
from agentgym.data.check import load_data
from agentgym.evaluation.evidence import PlayAnew, own_results, paired_evidence
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import Entry, Version
from agentgym.evaluation.paired import Incomparable
from agentgym.evaluation.promotion import Standing
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.publish import evidence_anew, promotions_of
from agentgym.evaluation.question import question_asked
from agentgym.evaluation.result import Result
from agentgym.evaluation.version_files import told_of_files
from agentgym.pipeline.audited import audit_for_gate
from agentgym.pipeline.table import open_store, semantic_of, steps_of
from agentgym.steps.context import Progress
from agentgym.steps.step import Kind
from agentgym.store.manifest import canonical_json, sha256
from agentgym.tracking.reaching import reaching


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
    """Let the gate judge a registered version, record its decision, and move the alias if it
    promotes. Missing evaluations are played first.

    A repeated call returns the recorded decision, until the alias moves. Errors: ConfigError.
    """
    store, splits = open_store(cfg), load_data(cfg)
    chosen_on = {item.item_id for item in (*splits.train, *splits.validation)}
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, store)
        candidate = promotions.version(number)
        audit = audit_for_gate(cfg, candidate.run_key)

        def evidence_for(champion: Version | None) -> Evidence:
            evidence = _evidence(cfg, candidate, champion, progress)
            items = {item for pair in evidence.pairs.values() for item in pair.items}
            return replace(evidence, num_seen=len(items & chosen_on), **audit)

        moves = sum(entry.moved for entry in promotions.history.entries())
        # all of the run's evaluation steps have the same protocol
        step = next(step for step in steps_of(cfg).values() if step.kind is Kind.EVALUATE)
        question = question_asked(semantic_of(step, cfg), splits)
        what = [
            *("promote", number, candidate.checkpoint, cfg.gate.semantic(), dict(audit), moves),
            question.to_json(),
        ]
        return promotions.consider(
            candidate,
            cfg.gate,
            evidence_for,
            sha256(canonical_json(what)),
            question=question,
        )


def _evidence(
    cfg: RunConfig, candidate: Version, champion: Version | None, progress: Progress | None
) -> Evidence:
    """Return the evidence for the gate.

    It is from the runs' own evaluations if the store has both and they are comparable; else both
    models play by one protocol.
    """
    store = open_store(cfg)
    final = candidate.evaluation_in(store)
    if final is not None and champion is not None and not cfg.gate.protocol:
        try:
            ours = own_results(store, final, champion)
            return paired_evidence(*ours, ())
        except (Incomparable, ValueError):
            pass  # evaluate both by the same protocol
    return evidence_anew(cfg, candidate, champion, play_anew(cfg, progress))


def force(cfg: RunConfig, number: str, why: str) -> Entry:
    """Move the alias without the gate and record a person's reason. Errors: ConfigError."""
    if not why.strip():
        raise ConfigError("--force needs --why: the history records why the gate was passed over")
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, open_store(cfg))
        return promotions.force(promotions.version(number), why)


def roll_back(cfg: RunConfig, to: str | None, why: str) -> Entry:
    """Move the alias back to version `to`, which had it before, and record the reason.

    to: None: the last version that had it before the present one. Errors: ConfigError.
    """
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

    Result: (True if they were changed or are gone, a line to print); (False, "") without a version.
    """
    with reaching(cfg.tracking_uri):
        promotions = promotions_of(cfg, open_store(cfg))
        number = promotions.number_of(now.champion) if now.champion else None
        changed, line = told_of_files(promotions, number) if number else (False, "")
    return changed, f"version {number}: {line}" if line and not changed else line
