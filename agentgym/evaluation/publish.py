"""What leaves a run: the registered model, and the report a person reads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.config import RunConfig
from agentgym.context import METRICS, TRAJECTORIES, StepContext, decode_trajectories
from agentgym.evaluation.passk import Interval
from agentgym.evaluation.report import (
    Curve,
    EpisodeExample,
    EvaluationPoint,
    EvaluationRow,
    StageSpan,
    evaluation_png,
    learning_curve_png,
    report_html,
)
from agentgym.ledger import parent_run, tracker_of
from agentgym.rollouts.horizon import stages
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking import LedgerError, decode_points
from agentgym.training.checkpoint import ARCHITECTURE, TOKENIZER, WEIGHTS
from agentgym.training.model import save_pretrained
from agentgym.types import Trajectory

if TYPE_CHECKING:
    from agentgym.steps import Step


def register_policy(ctx: StepContext, checkpoint_step: str, run_key: str) -> Manifest:
    """Put the checkpoint into the registry and move the alias to it; once per checkpoint, whatever is killed in between."""
    ctx.progress.start("register the model", 1)
    version = _register(ctx.cfg, ctx.store, ctx.parents[checkpoint_step], ctx.parents[f"evaluate-{checkpoint_step}"], run_key)
    ctx.progress.advance()
    return ctx.commit(
        done=True,
        state={},
        blobs={},
        results={"model": ctx.cfg.registry.model_name, "version": version, "alias": ctx.cfg.registry.alias, "checkpoint": checkpoint_step},
    )


def confirm_registration(cfg: RunConfig, store: RunStore, registered: Manifest, done: Mapping[str, Manifest], run_key: str) -> None:
    """Put the model back where the ledger was replaced since. Errors: LedgerError where it has another number there."""
    name, checkpoint = cfg.registry.model_name, done[registered.results["checkpoint"]]
    version = tracker_of(cfg).find_version(name, checkpoint.digest)
    if version is None:
        version = _register(cfg, store, checkpoint, done[f"evaluate-{checkpoint.step}"], run_key)
    if version != registered.results["version"]:
        raise LedgerError(
            f"{name}: MLflow has this checkpoint as version {version}, the store as version {registered.results['version']}; "
            f"delete {store.root}/steps/register-{registered.key[:16]} to register it again"
        )


def _register(cfg: RunConfig, store: RunStore, checkpoint: Manifest, evaluation: Manifest, run_key: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(
            Path(folder),
            architecture=store.read(checkpoint, ARCHITECTURE).decode(),
            weights=store.read(checkpoint, WEIGHTS),
            tokenizer=json.loads(store.read(checkpoint, TOKENIZER)),
        )
        return tracker_of(cfg).register_model(
            parent_run(cfg, run_key),
            Path(folder),
            name=cfg.registry.model_name,
            alias=cfg.registry.alias,
            tags={
                "step_key": checkpoint.digest,
                "run_key": run_key,
                "weights.sha256": checkpoint.blobs[WEIGHTS].digest,
                "algorithm": cfg.algorithm.recipe,
                "evaluation": evaluation.digest,
                **{f"eval.{name}": f"{interval['mean']:.4f}" for name, interval in evaluation.results["summary"].items()},
            },
            step=int(checkpoint.state["global_step"]),
        )


def write_report(ctx: StepContext, run_key: str, steps: Sequence[Step]) -> Manifest:
    """Curves, table and example episodes as one page; MLflow gets them once they are committed."""
    cfg = ctx.cfg
    titles = {step.name: step.title.removeprefix("evaluate ") for step in steps}
    ctx.progress.start("report", 2)
    evaluations = {name: manifest for name, manifest in ctx.parents.items() if name.startswith("evaluate-")}
    baseline = next(iter([m for m in evaluations.values() if "paired" in m.results])).results["paired"]["baseline"]
    compared = [name for name in evaluations if name == baseline or "paired" in evaluations[name].results]
    others = [name for name in evaluations if name not in compared]
    rows = {name: _row(evaluations[name], titles[name]) for name in [*compared, *others]}
    spans = stages(cfg.horizon)
    curve = learning_curve_png(
        _curves(ctx, [span.name for span in spans]),
        [StageSpan(span.name.replace("-", " "), span.first_step, span.last_step, span.max_turns) for span in spans],
        [
            EvaluationPoint(
                titles[name],
                int(evaluations[name].state["global_step"]),
                _intervals(evaluations[name])[f"avg_at_{cfg.evaluation.num_samples}"],
            )
            for name in compared
        ],
    )
    ctx.progress.advance()
    figures = {"Success while training": curve, "Success before and after": evaluation_png([rows[name] for name in compared])}
    last = evaluations[compared[-1]]
    registered = ctx.parents["register"].results
    page = report_html(
        f"{cfg.env_names} · {cfg.algorithm.recipe} · max_turns {' > '.join(map(str, cfg.horizon.max_turns))}",
        {
            "run": run_key[:12],
            "model": f"{registered['model']} version {registered['version']} ({registered['alias']})",
            "checkpoint": last.results["checkpoint"],
            "test items": str(last.results["num_items"]),
            "seed": str(cfg.seed),
        },
        list(rows.values()),
        figures,
        [*_examples(ctx, evaluations[baseline], titles[baseline]), *_examples(ctx, last, titles[last.step])],
        timings={name.replace("-", " "): manifest.timings.get("wall_s", 0.0) for name, manifest in ctx.parents.items()},
        confidence=cfg.evaluation.confidence,
        notes=ctx.parents["prepare"].results["warnings"],
    )
    ctx.progress.advance()
    pictures = {"learning_curve.png": curve, "evaluation.png": figures["Success before and after"]}
    pages = {"report.html": page.encode()}  # it names durations, so two equal runs have different ones
    return ctx.commit(
        done=True, state={}, blobs={**pictures}, records=pages, results={"before": evaluations[baseline].results, "after": last.results}
    )


def _intervals(manifest: Manifest, part: str = "summary") -> dict[str, Interval]:
    """Greedy first; pass@1 is avg@n under another name, and left out."""
    rows = manifest.results[part].items()
    intervals = {name: Interval(**row) for name, row in rows if name not in ("baseline", "pass_at_1")}
    return dict(sorted(intervals.items(), key=lambda item: item[0] != "greedy"))


def _row(manifest: Manifest, title: str) -> EvaluationRow:
    name = str(manifest.results["checkpoint"]).replace("-", " ")
    paired = _intervals(manifest, "paired") if "paired" in manifest.results else None
    return EvaluationRow(name, title, _intervals(manifest), paired, manifest.results["num_items"], manifest.results["max_turns"])


def _curves(ctx: StepContext, names: Sequence[str]) -> list[Curve]:
    points = [
        point
        for name in names
        for commit in ctx.store.history(name, ctx.parents[name].key)
        if METRICS in commit.records
        for point in decode_points(ctx.read(commit, METRICS))
    ]
    curves = []
    for metric, title, smooth in (("rollout/success", "training, sampled", True), ("validation/success", "validation, sampled", False)):
        found = [(point.step, point.metrics[metric]) for point in points if metric in point.metrics]
        curves.append(Curve(title, [step for step, _ in found], [value for _, value in found], smooth))
    return curves


def _examples(ctx: StepContext, evaluation: Manifest, title: str) -> list[EpisodeExample]:
    """One success and one failure of an evaluation, where there are both."""
    trajectories: list[Trajectory] = decode_trajectories(ctx.read(evaluation, TRAJECTORIES))
    chosen = [next((t for t in trajectories if t.status.is_valid and t.success is wanted), None) for wanted in (True, False)]
    return [EpisodeExample.from_trajectory(title, trajectory) for trajectory in chosen if trajectory is not None]
