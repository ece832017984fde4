"""Steps that publish a run: the registered model, and the report."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentgym.config import ConfigError, RunConfig
from agentgym.data.items import splits_from_json
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import HistoryElsewhere, Version, me, sentence, summary
from agentgym.evaluation.intervals import FAILED, Interval
from agentgym.evaluation.paired import Incomparable, align
from agentgym.evaluation.question import TAG as QUESTION
from agentgym.evaluation.question import question_of_evaluation
from agentgym.evaluation.record import examples_of
from agentgym.evaluation.registry import Promotions
from agentgym.evaluation.report import Curve, EvaluationRow, evaluation_png, learning_curve_png
from agentgym.evaluation.result import Result, ResultError
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.models.architecture import policy_digest
from agentgym.pages import single_page
from agentgym.steps.context import StepContext
from agentgym.steps.step import Kind, Step, stages
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import committed_alarms, committed_points, parent_run, tracker_of
from agentgym.tracking.points import LedgerError
from agentgym.tracking.registry import RECORD, find_version, lasting_files, register_model

logger = logging.getLogger(__name__)

PAGE = "report.html"


def register_policy(ctx: StepContext, run_key: str, play_anew: PlayAnew) -> Manifest:
    """Register the checkpoint, let the gate decide if the alias moves to it, and commit both.
    Return the commit. Idempotent per checkpoint. If the alias's history cannot be reached, nothing
    is decided, and the commit states why.
    run_key: of the run; play_anew: plays a registered version under the gate's protocol.
    """
    cfg, store = ctx.cfg, ctx.store
    ctx.progress.start("register the model", 1)
    evaluation = ctx.parents[ctx.step.evaluation]
    version = _register(cfg, store, ctx.checkpoint, evaluation, run_key)
    files = lasting_files(tracker_of(cfg), cfg.registered_model, version)
    promotions = promotions_of(cfg, store)
    candidate = promotions.version(version)

    def evidence_for(champion: Version | None) -> Evidence:
        evidence = evidence_of(cfg, store, evaluation, candidate, champion, play_anew)
        splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
        chosen_on = {item.item_id for item in (*splits.train, *splits.validation)}
        items = {item for pair in evidence.pairs.values() for item in pair.items}
        return replace(
            evidence,
            num_seen=len(items & chosen_on),
            reference_kl=reference_kl(store, ctx.checkpoint),
            **({} if evidence.audit == "failed" else ctx.audited(run_key)),
        )

    try:
        entry = promotions.consider(
            candidate,
            cfg.gate,
            evidence_for,
            ctx.writer.key,
            question=question_of_evaluation(store, evaluation),
            who=f"run r{run_key[:12]}, {me()}",
        )
    except HistoryElsewhere as error:
        entry = promotions.undecided(candidate, str(error))
    ctx.progress.advance()
    return ctx.commit(
        done=True,
        state={},
        blobs={},
        results={
            "model": cfg.registered_model,
            "version": version,
            "alias": cfg.registry.alias,
            "checkpoint": ctx.step.checkpoint,
            "champion": summary(entry),
        },
        # a record, not a blob: equal runs may register files with different digests
        records={RECORD: json.dumps(files, sort_keys=True).encode()} if files else {},
    )


def promotions_of(cfg: RunConfig, store: RunStore) -> Promotions:
    """Return the history and registry of the configured model and alias."""
    return Promotions(store, tracker_of(cfg), cfg.registered_model, cfg.registry.alias)


def evidence_of(
    cfg: RunConfig,
    store: RunStore,
    evaluation: Manifest | None,
    candidate: Version,
    champion: Version | None,
    play_anew: PlayAnew,
) -> Evidence:
    """Return evidence from the runs' own evaluations, or from playing the models anew.

    They are played anew with gate.protocol, without the candidate's `evaluation`, if the episodes
    of one are gone from the store, or if the two cannot be compared. If the candidate's recorded
    result is not that of its episodes, the evidence is a failed audit.
    """
    if evaluation is not None and not cfg.gate.protocol:
        try:
            if champion is None:
                return first_evidence(stored_result(store, evaluation))
            return paired_evidence(*own_results(store, evaluation, champion))
        except (NumbersChanged, DigestMismatch) as error:
            rivals, why = champion is not None, str(error)
            return Evidence({}, rivals, obstacle=why, audit="failed", audit_note=why)
        except (Incomparable, BlobMissing) as reason:
            logger.info("both models are evaluated by one protocol: %s", reason)
    return evidence_anew(cfg, candidate, champion, play_anew)


def evidence_anew(
    cfg: RunConfig, candidate: Version, champion: Version | None, play_anew: PlayAnew
) -> Evidence:
    """Return evidence from playing both models by one protocol, or the candidate alone if there is
    no champion. If the champion cannot be played or compared, the evidence has an `obstacle`.
    """
    name = cfg.registered_model
    candidate_result = play_anew(f"models:/{name}/{candidate.number}")
    if champion is None:
        return first_evidence(candidate_result)
    try:
        champion_result = play_anew(f"models:/{name}/{champion.number}")
        return paired_evidence(champion_result, candidate_result)
    except (Incomparable, ConfigError) as error:  # for example, the champion's files are gone
        return Evidence({}, True, obstacle=str(error))


def confirm_registration(
    cfg: RunConfig,
    store: RunStore,
    registered: Manifest,
    checkpoint: Manifest,
    evaluation: Manifest,
    run_key: str,
) -> None:
    """Register the model again if MLflow has lost it, and restore the alias from the history, if
    this can be reached. registered, checkpoint, evaluation: commits of these steps.
    Errors: LedgerError if MLflow has another version number, or files that are made anew differ.
    """
    name = cfg.registered_model
    again = f"delete {store.root}/steps/register-{registered.key[:16]} to register it again"
    version = find_version(tracker_of(cfg), name, checkpoint.digest)
    if version is None:
        version = _register(cfg, store, checkpoint, evaluation, run_key)
        committed = RECORD in registered.records and json.loads(store.read(registered, RECORD))
        if committed and lasting_files(tracker_of(cfg), name, version) != committed:
            raise LedgerError(
                f"{name}: MLflow had lost this checkpoint, and the packages here make other files"
                f" of it than {registered.step} commit {registered.seq} states; {again}"
            )
    if version != registered.results["version"]:
        raise LedgerError(
            f"{name}: MLflow has this checkpoint as version {version}, the store as version"
            f" {registered.results['version']}; {again}"
        )
    with contextlib.suppress(HistoryElsewhere):  # a process that can reach it restores the alias
        promotions_of(cfg, store).restore()


def _register(
    cfg: RunConfig, store: RunStore, checkpoint: Manifest, evaluation: Manifest, run_key: str
) -> str:
    """Register the checkpoint as a model without moving an alias. Return its version number."""
    from agentgym.models.checkpoint import save_pretrained  # imports torch, which is slow

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Path(folder), store, checkpoint)
        return register_model(
            tracker_of(cfg),
            parent_run(cfg, run_key),
            Path(folder),
            name=cfg.registered_model,
            alias=None,
            tags=tags_of_version(cfg, store, checkpoint, evaluation, run_key),
            step=int(checkpoint.state["global_step"]),
        )


def tags_of_version(
    cfg: RunConfig, store: RunStore, checkpoint: Manifest, evaluation: Manifest, run_key: str
) -> dict[str, str]:
    """Return a version's tags, except for its files' digests and those of the gate's decision."""
    question = question_of_evaluation(store, evaluation)
    return {
        "step_key": checkpoint.digest,
        "run_key": run_key,
        "weights.sha256": policy_digest(checkpoint),
        "algorithm": cfg.algorithm.recipe,
        "evaluation": evaluation.digest,
        "evaluation.step": evaluation.step,
        "evaluation.key": evaluation.key,
        **({QUESTION: question.to_json()} if question else {}),
        **headline_tags(evaluation),
    }


def headline_tags(evaluation: Manifest) -> dict[str, str]:
    """Return an evaluation's main numbers (shares, 4 decimals), as tags of the model version."""
    summary = evaluation.results["summary"]
    return {f"eval.{name}": f"{interval['mean']:.4f}" for name, interval in summary.items()}


def write_report(ctx: StepContext, run_key: str, steps: Mapping[str, Step]) -> Manifest:
    """Commit the report's page and pictures. Return the commit. MLflow gets them later."""
    ctx.progress.start("report", 1)
    files = report_files(ctx.cfg, ctx.store, ctx.parents, run_key, steps)
    ctx.progress.advance()
    evaluations = _compared(ctx.parents, steps)
    first, last = evaluations[0], evaluations[-1]
    registration = ctx.parents[ctx.step.registration].results
    registered = {
        **{name: registration[name] for name in ("model", "version", "alias")},
        "told": sentence(registration),
    }
    return ctx.commit(
        done=True,
        state={},
        blobs={name: data for name, data in files.items() if name != PAGE},
        records={PAGE: files[PAGE]},  # it names durations, so two equal runs have different ones
        results={"before": first.results, "after": last.results, "model": registered},
    )


def report_files(
    cfg: RunConfig,
    store: RunStore,
    parents: Mapping[str, Manifest],
    run_key: str,
    steps: Mapping[str, Step],
) -> dict[str, bytes]:
    """Return page and pictures by file name. parents: commits by step; steps: all steps by name."""
    titles = {name: step.title.removeprefix("evaluate ") for name, step in steps.items()}
    by_kind = {step.kind: parents[name] for name, step in steps.items() if name in parents}
    compared = _compared(parents, steps)
    others = [other for other in _evaluations(parents, steps).values() if other not in compared]
    rows = {final.step: _row(final, titles[final.step]) for final in [*compared, *others]}
    spans = stages(cfg.horizon)
    trained = [parents[span.name] for span in spans]
    average = f"avg_at_{cfg.evaluation.num_samples}"
    points = {
        titles[m.step]: (int(m.state["global_step"]), _intervals(m)[average]) for m in compared
    }
    curve = learning_curve_png(_curves(store, trained), spans, points)
    bars = evaluation_png([rows[manifest.step] for manifest in compared])
    last, registered = compared[-1], by_kind[Kind.REGISTER].results
    page = single_page(
        "report.html",
        title=f"{cfg.env_names} · {cfg.algorithm.recipe} · max_turns"
        f" {' > '.join(map(str, cfg.horizon.max_turns))}",
        facts={
            "run": run_key[:12],
            "model": f"{registered['model']} version {registered['version']}",
            registered["alias"]: sentence(registered),
            "checkpoint": last.results["checkpoint"],
            "test items": str(last.results["num_items"]),
            "seed": str(cfg.seed),
        },
        rows=list(rows.values()),
        figures={"Success while training": curve, "Success before and after": bars},
        episodes=[
            (titles[manifest.step], trajectory)
            for manifest in (compared[0], last)
            for trajectory in examples_of(store, store.history(manifest.step, manifest.key))
        ],
        timings={
            name.replace("-", " "): manifest.timings.get("wall_s", 0.0)
            for name, manifest in parents.items()
        },
        confidence=cfg.evaluation.confidence,
        notes=[
            *by_kind[Kind.PREPARE].results["warnings"],
            *by_kind[Kind.INITIALIZE].results.get("conversation", []),
            *map(str, committed_alarms(store, trained)),
        ],
    )
    return {"learning_curve.png": curve, "evaluation.png": bars, PAGE: page}


def _evaluations(parents: Mapping[str, Manifest], steps: Mapping[str, Step]) -> dict[str, Manifest]:
    return {name: final for name, final in parents.items() if steps[name].kind is Kind.EVALUATE}


def _compared(parents: Mapping[str, Manifest], steps: Mapping[str, Step]) -> list[Manifest]:
    """Return the commits of the baseline evaluation and of those compared with it, in order."""
    evaluations = _evaluations(parents, steps)
    paired = {name: final for name, final in evaluations.items() if "paired" in final.results}
    baseline = next(iter(paired.values())).results["paired"]["baseline"]
    return [final for name, final in evaluations.items() if name in {baseline, *paired}]


def _intervals(manifest: Manifest, part: str = "summary") -> dict[str, Interval]:
    """Return `results[part]` as intervals by name, greedy first, without pass@1 (equal to avg@n)
    and without the key `baseline`.
    """
    rows = sorted(manifest.results[part].items(), key=lambda item: item[0] != "greedy")
    return {name: Interval(**row) for name, row in rows if name not in ("baseline", "pass_at_1")}


def _row(manifest: Manifest, title: str) -> EvaluationRow:
    results = manifest.results
    return EvaluationRow(
        str(results["checkpoint"]).replace("-", " "),
        title,
        _intervals(manifest),
        _intervals(manifest, "paired") if "paired" in results else None,
        results["num_items"],
        results["max_turns"],
        results["coverage"],
        _intervals(manifest, FAILED),
    )


def _curves(store: RunStore, trained: Sequence[Manifest]) -> list[Curve]:
    points = [point for f in trained for point in committed_points(store, f.step, f.key)]
    curves = []
    for stage, metric in (("training", "rollout/success"), ("validation", "validation/success")):
        measured = [point for point in points if metric in point.metrics]
        steps, values = [p.step for p in measured], [p.metrics[metric] for p in measured]
        curves.append(Curve(f"{stage}, sampled", steps, values, stage == "training"))
    return curves


KL = "actor/reference_kl"
# `models:/NAME/VERSION` -> the result of that version under the gate's protocol
PlayAnew = Callable[[str], Result]


def first_evidence(result: Result) -> Evidence:
    """Return evidence about a candidate without a champion. Errors: Incomparable if unfinished."""
    alone = {
        env: replace(pair, before=np.full_like(pair.after, np.nan))
        for env, pair in align(result, result).items()
    }
    return Evidence(alone, False, (result.coverage, 1.0), (result.digest, ""))


def paired_evidence(champion: Result, candidate: Result) -> Evidence:
    """Return the evidence about a candidate and the current champion. Errors: Incomparable."""
    coverage, digests = (candidate.coverage, champion.coverage), (candidate.digest, champion.digest)
    tokens = (_tokens(candidate), _tokens(champion))
    return Evidence(align(champion, candidate), True, coverage, digests, tokens)


def _tokens(result: Result) -> float | None:
    """Mean number of generated tokens per episode that counts; None if none are reported."""
    num_tokens = [slot.usage.output_tokens for slot in result.slots if slot.counts]
    return float(np.mean(num_tokens)) if any(num_tokens) else None


def own_results(store: RunStore, evaluation: Manifest, champion: Version) -> tuple[Result, Result]:
    """Return (the champion's result, the candidate's), from their runs' own evaluations.
    evaluation: the candidate's. Errors: Incomparable, also if the champion's result is missing or
    cannot be read; those of `stored_result` for the candidate's, for example NumbersChanged.
    """
    ours = stored_result(store, evaluation)
    theirs = champion.evaluation_in(store)
    if theirs is None:
        raise Incomparable(f"the evaluation of version {champion.number} is not in this store")
    try:
        result = stored_result(store, theirs)
    except (BlobMissing, DigestMismatch, NumbersChanged, ResultError, KeyError) as error:
        raise Incomparable(f"the evaluation of version {champion.number}: {error}") from None
    align(result, ours)
    return result, ours


def reference_kl(store: RunStore, checkpoint: Manifest) -> float | None:
    """Return the last reference KL of the checkpoint's step, in nats per token; None if unknown."""
    points = committed_points(store, checkpoint.step, checkpoint.key)
    return next((p.metrics[KL] for p in reversed(points) if KL in p.metrics), None)
