"""The steps of a run in order, each with its inputs, the settings in its key and its code."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from agentgym.algorithms.recipe import recipe_modules
from agentgym.config import ConfigError, PolicyGradientConfig, RunConfig, config_digest
from agentgym.data.check import TASKS, compare_tasks, load_data, load_recorded, tasks_json
from agentgym.data.trajectories import RECORDED, encode, input_digest
from agentgym.rollouts.policies.engines import engine_module
from agentgym.steps.context import StepContext
from agentgym.steps.step import Kind, Stage, Step, stages
from agentgym.store.keys import environment_modules, source_digest, step_key
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore, StorePlace

logger = logging.getLogger(__name__)

PUBLISH = ("agentgym.evaluation.publish",)
DEMONSTRATE = "demonstrate"
# settings in a step's key, by dotted path
MODEL = ("seed", "deterministic", "compute_device", "env", "mix", "model")
CONVERSATION = ("rollout.instructions", "rollout.examples", "rollout.action_format")
DATA = ("seed", "data", "env", "mix", "warm_start.source")
SHOWN = ("seed", "env", "mix", "warm_start.source", "warm_start.num_demos")
DEMONSTRATIONS = (*SHOWN, *CONVERSATION, "rollout.episode_timeout_s")
WARM_START = (*MODEL, "warm_start", "learner")
TRAINING = (*MODEL, "rollout", "algorithm", "optimizer", "lora", "learner", "horizon", "validation")
ENGINE = ("rollout.engine", "rollout.engine_dtype", "rollout.max_new_tokens")
FAILURES = ("rollout.episode_timeout_s", "rollout.max_attempts", "rollout.max_env_error_frac")
PLAYED = ("deterministic", "compute_device", "env", "mix", "model.context_tokens", *ENGINE)
EVALUATION = (*PLAYED, *CONVERSATION, *FAILURES, "evaluation")


def steps_of(cfg: RunConfig) -> dict[str, Step]:
    """Return name -> step for every step of a run, parents before children."""
    servers = tuple(
        dict.fromkeys(module for env in cfg.envs for module in environment_modules(env.name))
    )
    playing = (*servers, engine_module(cfg.rollout.engine))
    steps = _preparation(cfg, servers)
    start, title = steps[-1].name, "evaluate the initial model"
    if cfg.warm_start.enabled:
        untrained = _evaluation(start, "evaluate the untrained model", "", playing)
        warm_start = Step(
            name="warm-start",
            title="warm start (SFT)",
            kind=Kind.TRAIN,
            run=_imported("agentgym.training.sft", "warm_start"),
            sections=(*WARM_START, *(("lora",) if cfg.model.source == "hub" else ())),
            modules=("agentgym.training.sft",),
            checkpoint=start,
            demonstrations=DEMONSTRATE,
        )
        start, title = warm_start.name, "evaluate the warm start"
        steps += [replace(untrained, headline=False), warm_start]
    steps.append(_evaluation(start, title, "", playing))
    baseline, current, spans = steps[-1].name, start, stages(cfg.horizon)
    for stage in spans:
        steps.append(_training(cfg, stage, len(spans), current, start, playing))
        current, title = stage.name, f"evaluate stage {stage.index}/{len(spans)}"
        steps.append(_evaluation(current, title, baseline, playing))
    steps += _conclusion(cfg, steps)
    return {step.name: step for step in steps}


def _preparation(cfg: RunConfig, servers: tuple[str, ...]) -> list[Step]:
    """Return the steps that make items, demonstrations (if training uses them) and first model."""
    prepare = Step(
        name="prepare",
        title="prepare data",
        kind=Kind.PREPARE,
        run=_prepare,
        sections=DATA,
        modules=("agentgym.data.items", "agentgym.data.trajectories", *servers),
    )
    demonstrate = Step(
        name=DEMONSTRATE,
        title="play demonstrations",
        kind=Kind.DEMONSTRATE,
        run=_imported("agentgym.training.demonstrations", "record_demonstrations"),
        sections=DEMONSTRATIONS,
        modules=("agentgym.training.demonstrations", *servers),
        data=prepare.name,
    )
    has_demonstrations, is_drawn = cfg.warm_start.enabled, cfg.model.source == "tiny"
    initialize = Step(
        name="initialize",
        title="initial model",
        kind=Kind.INITIALIZE,
        run=_imported("agentgym.training.initial", "initialize"),
        sections=("seed", "model") if is_drawn else ("model",),
        modules=("agentgym.training.initial",),
        # a tiny model's tokenizer is trained on them
        demonstrations=DEMONSTRATE if is_drawn and has_demonstrations else "",
    )
    return [prepare, *([demonstrate] if has_demonstrations else []), initialize]


def _conclusion(cfg: RunConfig, steps: Sequence[Step]) -> tuple[Step, Step]:
    """Return steps `register`, `report`. steps: all before; the last evaluates the final model."""

    def register(ctx: StepContext) -> Manifest:
        from agentgym.evaluation.publish import register_policy

        return register_policy(ctx, run_key(cfg), ctx.play_anew)

    def report(ctx: StepContext) -> Manifest:
        from agentgym.evaluation.publish import write_report

        return write_report(ctx, run_key(cfg), steps_of(cfg))

    registration = Step(
        name="register",
        title="register the model",
        kind=Kind.REGISTER,
        run=register,
        sections=("registry", "gate"),
        modules=PUBLISH,
        data="prepare",
        checkpoint=steps[-1].checkpoint,
        evaluation=steps[-1].name,
    )
    # checkpoints first, then evaluations
    judged = sorted(steps, key=lambda step: step.kind is Kind.EVALUATE)
    last = Step(
        name="report",
        title="report",
        kind=Kind.REPORT,
        run=report,
        sections=("registry", "horizon"),
        modules=PUBLISH,
        told=tuple(step.name for step in judged),
        registration=registration.name,
    )
    return registration, last


def _evaluation(checkpoint: str, title: str, baseline: str, playing: tuple[str, ...]) -> Step:
    """Return the evaluation step of a checkpoint, paired with `baseline` if that is not empty."""
    return Step(
        name=f"evaluate-{checkpoint}",
        title=title,
        kind=Kind.EVALUATE,
        run=_imported("agentgym.evaluation.evaluator", "evaluate"),
        sections=EVALUATION,
        modules=("agentgym.evaluation.evaluator", *playing),
        data="prepare",
        checkpoint=checkpoint,
        baseline=baseline,
        headline=True,
    )


def _training(
    cfg: RunConfig, stage: Stage, num_stages: int, before: str, start: str, playing: tuple[str, ...]
) -> Step:
    """Return the training step of a stage.

    before: the step whose weights it continues from. start: the step whose weights a KL penalty or
    self-training refers to.
    """
    algorithm, loop = cfg.algorithm, cfg.algorithm.loop
    turns = (
        " > ".join(map(str, cfg.horizon.max_turns))
        if cfg.horizon.kind == "adaptive"
        else stage.max_turns
    )
    penalized = isinstance(algorithm, PolicyGradientConfig) and algorithm.kl_coef
    compares = loop.prefers and cfg.warm_start.source == "trajectories"
    return Step(
        name=stage.name,
        title=f"stage {stage.index}/{num_stages} · max_turns {turns}",
        kind=Kind.TRAIN,
        run=_imported(loop.trainer, "train_stage", stage),
        sections=TRAINING,
        modules=(loop.trainer, *playing, *recipe_modules(algorithm.recipe)),
        data="prepare",
        checkpoint=before,
        start=start if penalized or loop.begins_anew else "",
        demonstrations=DEMONSTRATE if loop.imitates or compares else "",
        stage=stage,
        is_continued=loop.keeps_optimizer and stage.index < num_stages,
        headline=True,
    )


def _imported(module: str, function: str, *more: Stage) -> Callable[[StepContext], Manifest]:
    """Return a step's function, which is imported when it runs: most of them need torch.
    more: its arguments after the context.
    """

    def run(ctx: StepContext) -> Manifest:
        return cast(Manifest, getattr(importlib.import_module(module), function)(ctx, *more))

    return run


def run_key(cfg: RunConfig) -> str:
    """Return a run's key, 64 hex digits: the digest of `run_identity`."""
    return config_digest(run_identity(cfg))


def run_identity(cfg: RunConfig) -> dict[str, Any]:
    """Return all that changes a run's results: settings (`config`), the digest of the `data`, and
    step -> digest of its source (`sources`).
    """
    sources = {name: source_digest(step.modules) for name, step in steps_of(cfg).items()}
    return {"config": cfg.semantic(), "data": input_digest(cfg), "sources": sources}


def run_label(cfg: RunConfig) -> str:
    """Name of a run for people and clusters: r and the first 12 digits of its key."""
    return f"r{run_key(cfg)[:12]}"


def open_store(cfg: RunConfig) -> RunStore:
    """Open the configured store. Errors: ConfigError if store.uri cannot be used."""
    return StorePlace(cfg.store.uri or str(cfg.store.path), cfg.store.lease_ttl_s).open()


def key_of(step: Step, cfg: RunConfig, parents: dict[str, Manifest]) -> str:
    """Return the step's key. parents: final manifests, by step."""
    inputs = {name: parents[name].digest for name in step.parents}
    if step.kind is Kind.PREPARE:
        inputs["data"] = input_digest(cfg)
    return step_key(
        step.name, config=semantic_of(step, cfg), inputs=inputs, source=source_digest(step.modules)
    )


def semantic_of(step: Step, cfg: RunConfig) -> dict[str, Any]:
    """Return dotted path -> value of the settings in the step's key."""
    tree = cfg.semantic()
    return {path: value_at(tree, path) for path in step.sections}


def value_at(tree: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path of nested dicts."""
    return functools.reduce(lambda part, name: part[name], path.split("."), tree)


def finished(cfg: RunConfig, store: RunStore) -> dict[str, Manifest]:
    """Return step -> final manifest of steps that are finished, with all parents, in order."""
    manifests: dict[str, Manifest] = {}
    for name, step in steps_of(cfg).items():
        if all(parent in manifests for parent in step.parents):
            final = store.final(name, key_of(step, cfg, manifests))
            if final is not None:
                manifests[name] = final
    return manifests


def begun(cfg: RunConfig, store: RunStore) -> dict[str, Manifest]:
    """Return step -> newest commit of this configuration's steps, finished or in progress."""
    heads = finished(cfg, store)
    done = dict(heads)
    for name, step in steps_of(cfg).items():
        if name not in done and all(parent in done for parent in step.parents):
            head = store.head(name, key_of(step, cfg, done))
            if head is not None:
                heads[name] = head
    return heads


def known_steps(cfg: RunConfig, *names: str) -> dict[str, Step]:
    """Return `steps_of`. Errors: ConfigError if it lacks one of these names."""
    table = steps_of(cfg)
    if unknown := set(names) - table.keys():
        raise ConfigError(
            f"unknown step {min(unknown)!r}; this configuration has: {', '.join(table)}"
        )
    return table


def with_parents(cfg: RunConfig, *names: str) -> tuple[str, ...]:
    """Return these steps and their ancestors, in order. Errors: ConfigError for an unknown name."""
    table, needed = known_steps(cfg, *names), set(names)
    for name in reversed(table):  # parents come before their children
        if name in needed:
            needed.update(table[name].parents)
    return tuple(name for name in table if name in needed)


def _prepare(ctx: StepContext) -> Manifest:
    splits = load_data(ctx.cfg)
    tasks = compare_tasks(ctx.cfg.envs, splits)
    splits = replace(splits, warnings=(*splits.warnings, *tasks.repeated, *tasks.unknown))
    for warning in splits.warnings:
        logger.warning("%s", warning)
    recorded = load_recorded(ctx.cfg)
    return ctx.commit(
        done=True,
        state={},
        blobs={
            "splits.json": splits.to_json(),
            TASKS: tasks_json(tasks, splits),
            **({RECORDED: encode(recorded)} if recorded else {}),
        },
        results={
            **{name: len(getattr(splits, name)) for name in ("train", "validation", "test")},
            "digest": splits.digest,
            "warnings": list(splits.warnings),
            **({"trajectories": len(recorded)} if recorded else {}),
        },
    )
