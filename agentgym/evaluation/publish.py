"""Steps that publish a run: the registered model, and the report."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.data.items import splits_from_json
from agentgym.evaluation.decision import sentence, summary
from agentgym.evaluation.evidence import (
    PlayAnew,
    first_evidence,
    incomparable,
    own_results,
    paired_evidence,
    reference_kl,
)
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import HistoryElsewhere, Version, me
from agentgym.evaluation.paired import Incomparable
from agentgym.evaluation.passk import FAILED, Interval
from agentgym.evaluation.promotion import Promotions
from agentgym.evaluation.question import TAG as QUESTION
from agentgym.evaluation.question import question_of_evaluation
from agentgym.evaluation.record import examples_of
from agentgym.evaluation.report import (
    Curve,
    EvaluationRow,
    evaluation_png,
    learning_curve_png,
)
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.models.checkpoint import policy_digest, save_pretrained
from agentgym.pages import single_page
from agentgym.steps.context import StepContext
from agentgym.steps.step import Kind, Step, stages
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import committed_alarms, committed_points, parent_run, tracker_of
from agentgym.tracking.points import LedgerError
from agentgym.tracking.registry import RECORD, find_version, lasting_files, register_model

logger = logging.getLogger(__name__)

PAGE = "report.html"


def register_policy(ctx: StepContext, run_key: str, play_anew: PlayAnew) -> Manifest:
    """Register the checkpoint, let the gate decide whether the alias moves to it, and commit both.

    It is registered once per checkpoint, also after a crash.
    play_anew: plays a registered version under the gate's protocol.
    """
    cfg, store = ctx.cfg, ctx.store
    ctx.progress.start("register the model", 1)
    evaluation = ctx.parents[ctx.step.evaluation]
    version = _register(cfg, store, ctx.checkpoint, evaluation, run_key)
    files = lasting_files(tracker_of(cfg), cfg.registered_model, version)
    promotions = promotions_of(cfg, store)
    candidate = promotions.version(version)

    def evidence_for(champion: Version | None) -> Evidence:
        evidence = _evidence(cfg, store, evaluation, candidate, champion, play_anew)
        splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
        chosen_on = {item.item_id for item in (*splits.train, *splits.validation)}
        items = {item for pair in evidence.pairs.values() for item in pair.items}
        return replace(
            evidence,
            num_seen=len(items & chosen_on),
            reference_kl=reference_kl(store, ctx.checkpoint),
            **ctx.audited(run_key),
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
        # two equal runs may differ: files of a model that is registered again are not the same
        records={RECORD: json.dumps(files, sort_keys=True).encode()} if files else {},
    )


def promotions_of(cfg: RunConfig, store: RunStore) -> Promotions:
    """Return the promotions of the configured alias."""
    return Promotions(store, tracker_of(cfg), cfg.registered_model, cfg.registry.alias)


def _evidence(
    cfg: RunConfig,
    store: RunStore,
    evaluation: Manifest,
    candidate: Version,
    champion: Version | None,
    play_anew: PlayAnew,
) -> Evidence:
    """Return evidence from the runs' own evaluations; play both models anew if these cannot be
    compared or `gate.protocol` is set.
    """
    if not cfg.gate.protocol:
        if champion is None:
            return first_evidence(stored_result(store, evaluation))
        try:
            return paired_evidence(*own_results(store, evaluation, champion), ())
        except NumbersChanged as error:
            return replace(incomparable(str(error)), audit="failed", audit_note=str(error))
        except Incomparable as reason:
            logger.info("both models are evaluated by one protocol: %s", reason)
    return evidence_anew(cfg, candidate, champion, play_anew)


def evidence_anew(
    cfg: RunConfig, candidate: Version, champion: Version | None, play_anew: PlayAnew
) -> Evidence:
    """Return evidence from playing both models by one protocol, or why they cannot be compared."""
    name = cfg.registered_model
    candidate_result = play_anew(f"models:/{name}/{candidate.number}")
    if champion is None:
        return first_evidence(candidate_result)
    try:
        champion_result = play_anew(f"models:/{name}/{champion.number}")
        return paired_evidence(champion_result, candidate_result, ())
    except (Incomparable, ConfigError) as error:  # for example, the champion's files are gone
        return incomparable(str(error))


def confirm_registration(
    cfg: RunConfig,
    store: RunStore,
    registered: Manifest,
    checkpoint: Manifest,
    evaluation: Manifest,
    run_key: str,
) -> None:
    """Register the model again if MLflow has lost it, and restore the alias from the history.

    Errors: LedgerError if MLflow has it under another version number, or if the files that it is
    registered with again differ from the committed ones.
    """
    name = cfg.registered_model
    version = find_version(tracker_of(cfg), name, checkpoint.digest)
    if version is None:
        version = _register(cfg, store, checkpoint, evaluation, run_key)
        committed = RECORD in registered.records and json.loads(store.read(registered, RECORD))
        if committed and lasting_files(tracker_of(cfg), name, version) != committed:
            raise LedgerError(
                f"{name}: MLflow had lost this checkpoint, and the packages here make other files"
                f" of it than {registered.step} commit {registered.seq} states; delete"
                f" {store.root}/steps/register-{registered.key[:16]} to register it again"
            )
    if version != registered.results["version"]:
        raise LedgerError(
            f"{name}: MLflow has this checkpoint as version {version}, the store as version"
            f" {registered.results['version']}; delete"
            f" {store.root}/steps/register-{registered.key[:16]} to register it again"
        )
    with contextlib.suppress(HistoryElsewhere):  # a process that can reach it restores the alias
        promotions_of(cfg, store).restore()


def _register(
    cfg: RunConfig, store: RunStore, checkpoint: Manifest, evaluation: Manifest, run_key: str
) -> str:
    """Register the checkpoint. Result: the version."""
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
    """Return a registered version's tags, without its files' digests and the last decision."""
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
    """Return an evaluation's main numbers, as tags of the model version that was evaluated."""
    return {
        f"eval.{name}": f"{interval['mean']:.4f}"
        for name, interval in evaluation.results["summary"].items()
    }


def write_report(ctx: StepContext, run_key: str, steps: Mapping[str, Step]) -> Manifest:
    """Commit a page with curves, table and example episodes; MLflow gets it after the commit."""
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
    """Return the page and its pictures by file name. parents: commits of the steps, by name."""
    titles = {name: step.title.removeprefix("evaluate ") for name, step in steps.items()}
    by_kind = {step.kind: parents[name] for name, step in steps.items() if name in parents}
    compared = _compared(parents, steps)
    others = [other for other in _evaluations(parents, steps).values() if other not in compared]
    rows = {
        manifest.step: _row(manifest, titles[manifest.step]) for manifest in [*compared, *others]
    }
    spans = stages(cfg.horizon)
    trained = [parents[span.name] for span in spans]
    points = {
        titles[manifest.step]: (
            int(manifest.state["global_step"]),
            _intervals(manifest)[f"avg_at_{cfg.evaluation.num_samples}"],
        )
        for manifest in compared
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
        notes=[*_notes(by_kind), *map(str, committed_alarms(store, trained))],
    )
    return {"learning_curve.png": curve, "evaluation.png": bars, PAGE: page}


def _notes(by_kind: Mapping[Kind, Manifest]) -> list[str]:
    """Return warnings about the data, and notes on how conversations are written."""
    conversation = by_kind[Kind.INITIALIZE].results.get("conversation", [])
    return [*by_kind[Kind.PREPARE].results["warnings"], *conversation]


def _evaluations(parents: Mapping[str, Manifest], steps: Mapping[str, Step]) -> dict[str, Manifest]:
    return {
        name: manifest for name, manifest in parents.items() if steps[name].kind is Kind.EVALUATE
    }


def _compared(parents: Mapping[str, Manifest], steps: Mapping[str, Step]) -> list[Manifest]:
    """Return the baseline evaluation and those compared with it, in order."""
    evaluations = _evaluations(parents, steps)
    baseline = next(
        m.results["paired"]["baseline"] for m in evaluations.values() if "paired" in m.results
    )
    return [
        manifest
        for name, manifest in evaluations.items()
        if name == baseline or "paired" in manifest.results
    ]


def _intervals(manifest: Manifest, part: str = "summary") -> dict[str, Interval]:
    """Return an evaluation's intervals, greedy first, without pass@1, which equals avg@n."""
    rows = manifest.results[part].items()
    intervals = {
        name: Interval(**row) for name, row in rows if name not in ("baseline", "pass_at_1")
    }
    return dict(sorted(intervals.items(), key=lambda item: item[0] != "greedy"))


def _row(manifest: Manifest, title: str) -> EvaluationRow:
    name = str(manifest.results["checkpoint"]).replace("-", " ")
    paired = _intervals(manifest, "paired") if "paired" in manifest.results else None
    results = manifest.results
    failed = _intervals(manifest, FAILED)
    return EvaluationRow(
        name,
        title,
        _intervals(manifest),
        paired,
        results["num_items"],
        results["max_turns"],
        results["coverage"],
        failed,
    )


def _curves(store: RunStore, trained: Sequence[Manifest]) -> list[Curve]:
    points = [
        point for final in trained for point in committed_points(store, final.step, final.key)
    ]
    curves = []
    for metric, title, smooth in (
        ("rollout/success", "training, sampled", True),
        ("validation/success", "validation, sampled", False),
    ):
        measured = [
            (point.step, point.metrics[metric]) for point in points if metric in point.metrics
        ]
        curves.append(
            Curve(title, [step for step, _ in measured], [value for _, value in measured], smooth)
        )
    return curves
