"""The steps of a run in order: what each needs, what changes its result, what computes it."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import Any

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import ConfigError, RunConfig, config_digest
from agentgym.data.check import compare_tasks, load_data, load_recorded
from agentgym.data.trajectories import RECORDED, encode, input_digest
from agentgym.rollouts.horizon import stages
from agentgym.steps.context import StepContext
from agentgym.steps.step import Step
from agentgym.store.keys import source_digest, step_key
from agentgym.store.manifest import Manifest
from agentgym.store.posix import posix_store
from agentgym.store.runstore import RunStore

logger = logging.getLogger(__name__)


def steps_of(cfg: RunConfig) -> dict[str, Step]:
    """Every step of a run in an order that respects parents."""
    model = ("seed", "deterministic", "env", "mix", "model")
    failing = tuple(
        f"rollout.{name}" for name in ("episode_timeout_s", "max_attempts", "max_env_error_frac")
    )
    episodes = (
        "rollout.max_new_tokens",
        "rollout.system_prompt",
        "rollout.action_format",
        *failing,
    )
    demonstrations = (
        *model,
        "warm_start",
        "rollout.system_prompt",
        "rollout.action_format",
        "rollout.episode_timeout_s",
    )
    offline = () if RECIPES[cfg.algorithm.recipe].loop == "rl" else ("offline",)
    training = (*model, "rollout", "algorithm", "optimizer", "horizon", "validation", *offline)
    evaluation = ("deterministic", "env", "mix", "model.context_tokens", *episodes, "evaluation")
    env_modules = (
        "envs.server",
        *(source for env in cfg.envs if _is_module(source := f"envs.{env.name}")),
    )
    table: dict[str, Step] = {}

    def add(
        name: str,
        title: str,
        parents: tuple[str, ...],
        sections: tuple[str, ...],
        modules: tuple[str, ...],
        run: Any,
        headline: bool = False,
    ) -> str:
        table[name] = Step(name, title, parents, sections, modules, run, headline)
        return name

    def add_evaluation(
        checkpoint: str, title: str, baseline: str | None, headline: bool = True
    ) -> str:
        def run(ctx: StepContext) -> Manifest:
            from agentgym.evaluation.evaluate import evaluate

            return evaluate(ctx, checkpoint, baseline)

        parents = ("prepare", checkpoint, *((baseline,) if baseline else ()))
        name = f"evaluate-{checkpoint}"
        return add(
            name,
            title,
            parents,
            evaluation,
            ("agentgym.evaluation.evaluate", *env_modules),
            run,
            headline,
        )

    data = ("seed", "data", "env", "mix", "warm_start.source")
    add(
        "prepare",
        "prepare data",
        (),
        data,
        ("agentgym.data.items", "agentgym.data.trajectories", *env_modules),
        _prepare,
    )
    current = add(
        "initialize",
        "demonstrations and initial model",
        ("prepare",),
        demonstrations,
        ("agentgym.training.sft", *env_modules),
        _initialize,
    )
    if cfg.warm_start.enabled:
        add_evaluation(current, "evaluate the untrained model", None, headline=False)
        current = add(
            "warm-start",
            "warm start (SFT)",
            ("initialize",),
            demonstrations,
            ("agentgym.training.sft",),
            _warm_start,
        )
    baseline = add_evaluation(
        current,
        "evaluate the warm start" if cfg.warm_start.enabled else "evaluate the initial model",
        None,
    )
    base, spans, loop = current, stages(cfg.horizon), RECIPES[cfg.algorithm.recipe].loop
    trainer = "agentgym.training.rl" if loop == "rl" else "agentgym.training.offline"
    for stage in spans:

        def train(ctx: StepContext, stage: Any = stage) -> Manifest:
            manifest: Manifest = importlib.import_module(trainer).train_stage(ctx, stage)
            return manifest

        turns = (
            " > ".join(map(str, cfg.horizon.max_turns))
            if cfg.horizon.kind == "adaptive"
            else stage.max_turns
        )
        title = f"stage {stage.index}/{len(spans)} · max_turns {turns}"
        reference = (
            (base,) if (cfg.algorithm.kl_coef or loop == "evolve") and base != current else ()
        )
        prefers_demos = loop == "dpo" and cfg.warm_start.source == "trajectories"
        demos = ("initialize",) if loop in ("sft", "evolve") or prefers_demos else ()
        current = add(
            stage.name,
            title,
            ("prepare", current, *reference, *demos),
            training,
            (trainer, *env_modules),
            train,
            True,
        )
        add_evaluation(current, f"evaluate stage {stage.index}/{len(spans)}", baseline)
    evaluations = tuple(name for name in table if name.startswith("evaluate-"))

    def register(ctx: StepContext) -> Manifest:
        from agentgym.evaluation.publish import register_policy

        return register_policy(ctx, current, run_key(cfg))

    add(
        "register",
        "register the model",
        (current, f"evaluate-{current}"),
        ("registry",),
        ("agentgym.evaluation.publish",),
        register,
    )

    def report(ctx: StepContext) -> Manifest:
        from agentgym.evaluation.publish import write_report

        return write_report(ctx, run_key(cfg), tuple(table.values()))

    checkpoints = tuple(
        name for name in table if name in ("initialize", "warm-start") or name.startswith("stage-")
    )
    add(
        "report",
        "report",
        ("prepare", *checkpoints, *evaluations, "register"),
        ("registry", "horizon"),
        ("agentgym.evaluation.publish",),
        report,
    )
    return table


def run_key(cfg: RunConfig) -> str:
    """Names a run: everything that changes any of its results, as 64 hex digits."""
    sources = {name: source_digest(step.modules) for name, step in steps_of(cfg).items()}
    return config_digest({"config": cfg.semantic(), "data": input_digest(cfg), "sources": sources})


def open_store(cfg: RunConfig) -> RunStore:
    """Errors: ConfigError where store.uri cannot be used as it is."""
    if cfg.store.uri:
        from agentgym.store.s3 import s3_store

        return s3_store(cfg.store.uri, lease_ttl_s=cfg.store.lease_ttl_s)
    return posix_store(cfg.store.path, lease_ttl_s=cfg.store.lease_ttl_s)


def key_of(step: Step, cfg: RunConfig, parents: dict[str, Manifest]) -> str:
    """The step's identity, given the final manifests of its parents."""
    inputs = {name: parents[name].digest for name in step.parents}
    if not step.parents:
        inputs["data"] = input_digest(cfg)
    return step_key(
        step.name, config=semantic_of(step, cfg), inputs=inputs, source=source_digest(step.modules)
    )


def semantic_of(step: Step, cfg: RunConfig) -> dict[str, Any]:
    """The part of the configuration in the step's key, by dotted path."""
    tree = cfg.semantic()
    result: dict[str, Any] = {}
    for path in step.sections:
        value: Any = tree
        for part in path.split("."):
            value = value[part]
        result[path] = value
    return result


def finished(cfg: RunConfig, store: RunStore) -> dict[str, Manifest]:
    """Final manifests of the steps that are done under this configuration, in order; a step
    needs its parents.
    """
    manifests: dict[str, Manifest] = {}
    for name, step in steps_of(cfg).items():
        if all(parent in manifests for parent in step.parents):
            final = store.final(name, key_of(step, cfg, manifests))
            if final is not None:
                manifests[name] = final
    return manifests


def with_parents(cfg: RunConfig, *names: str) -> tuple[str, ...]:
    """These steps and all that they need, in order. Errors: ConfigError for an unknown name."""
    table = steps_of(cfg)
    needed = set(names)
    if unknown := needed - table.keys():
        raise ConfigError(
            f"unknown step {min(unknown)!r}; this configuration has: {', '.join(table)}"
        )
    for name in reversed(table):  # parents come before their children
        if name in needed:
            needed.update(table[name].parents)
    return tuple(name for name in table if name in needed)


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _prepare(ctx: StepContext) -> Manifest:
    splits = load_data(ctx.cfg)
    repeated, unknown = compare_tasks(ctx.cfg.envs, splits)
    splits = replace(splits, warnings=(*splits.warnings, *repeated, *unknown))
    for warning in splits.warnings:
        logger.warning("%s", warning)
    sizes = {name: len(getattr(splits, name)) for name in ("train", "validation", "test")}
    recorded = load_recorded(ctx.cfg)
    return ctx.commit(
        done=True,
        state={},
        blobs={
            "splits.json": splits.to_json(),
            **({RECORDED: encode(recorded)} if recorded else {}),
        },
        results={
            **sizes,
            "digest": splits.digest,
            "warnings": list(splits.warnings),
            **({"trajectories": len(recorded)} if recorded else {}),
        },
    )


def _initialize(ctx: StepContext) -> Manifest:
    from agentgym.training.sft import initialize

    return initialize(ctx)


def _warm_start(ctx: StepContext) -> Manifest:
    from agentgym.training.sft import warm_start

    return warm_start(ctx)
