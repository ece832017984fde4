"""The steps of a run, their keys, and `run_step`: the one function every shell calls.

A step finds out itself whether it is done, half done or new.
Prefect tasks, `agentgym step` and tests differ in nothing but how they show it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import ConfigError, EnvConfig, RunConfig, config_digest
from agentgym.data.items import (
    SPLITS,
    Splits,
    load_splits,
    mix_splits,
    repeated_tasks,
    train_stream,
)
from agentgym.data.trajectories import RECORDED, Recorded, encode, input_digest, load_trajectories
from agentgym.rollouts.client import Endpoints, token_of
from agentgym.rollouts.horizon import stages
from agentgym.steps.context import METRICS, Environment, NoProgress, Progress, StepContext
from agentgym.steps.step import Outcome, Step
from agentgym.store.keys import source_digest, step_key
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.posix import posix_store
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import Paced, curve, deliver_step, ledger_identity
from agentgym.tracking.mlflow import reaching
from agentgym.types import Endpoint

logger = logging.getLogger(__name__)

WAIT_POLL_S = 0.5

# whatever the compute: they need no accelerator
STAYS_HERE = ("prepare", "initialise", "register", "report")


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
    training = (*model, "rollout", "algorithm", "optimiser", "horizon", "validation", *offline)
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
        "initialise",
        "demonstrations and initial model",
        ("prepare",),
        demonstrations,
        ("agentgym.training.sft", *env_modules),
        _initialise,
    )
    if cfg.warm_start.enabled:
        add_evaluation(current, "evaluate the untrained model", None, headline=False)
        current = add(
            "warm-start",
            "warm start (SFT)",
            ("initialise",),
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
        demos = ("initialise",) if loop in ("sft", "evolve") or prefers_demos else ()
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
        name for name in table if name in ("initialise", "warm-start") or name.startswith("stage-")
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


def load_data(cfg: RunConfig) -> Splits:
    """The configured items, checked, also against what the run asks of them.
    Errors: ConfigError.
    """
    splits = mix_splits(cfg.weights, list(splits_by_env(cfg).values()))
    if (
        RECIPES[cfg.algorithm.recipe].loop in ("dpo", "evolve")
        and cfg.offline.num_items > len(splits.train) // 3
    ):
        raise ConfigError(
            f"offline.num_items {cfg.offline.num_items} is more than a third of the"
            f" {len(splits.train)} train items of {cfg.env_names}, so that one stage could meet an"
            " item twice; lower it"
        )
    for key, asked, name, items in (
        (
            "evaluation.num_items",
            cfg.evaluation.num_items,
            cfg.evaluation.split,
            getattr(splits, cfg.evaluation.split),
        ),
        ("rollout.items_per_step", cfg.rollout.items_per_step, "train", splits.train),
    ):
        if asked > len(items):
            raise ConfigError(
                f"{key} {asked} is more than the {len(items)} {name} items of {cfg.env_names};"
                " lower it"
            )
    _check_draws(cfg, splits)
    return splits


def splits_by_env(cfg: RunConfig) -> dict[str, Splits]:
    """The items of each environment of the run. Errors: DataError."""
    fraction = cfg.data.validation_fraction
    return {
        env: load_splits(cfg.data.path, env, validation_fraction=fraction, seed=cfg.seed)
        for env in cfg.weights
    }


def load_recorded(cfg: RunConfig) -> list[Recorded]:
    """The trajectories of others that the run learns from; none where it does not.
    Errors: DataError.
    """
    if cfg.warm_start.source != "trajectories":
        return []
    return load_trajectories(cfg.data.trajectories, splits_by_env(cfg))


def compare_tasks(
    envs: Sequence[EnvConfig], splits: Splits
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(warnings about tasks that stand there under several ids, warnings about environments that
    cannot say), one line each.

    Errors: ConfigError where an item names no task, or the environment cannot be had here as it is
    set.
    """
    from agentgym.deploy.local import IdentitiesUnknown, task_identities

    repeated: list[str] = []
    unknown: list[str] = []
    for env in envs:
        items = [item for name in SPLITS for item in getattr(splits, name) if item.env == env.name]
        try:
            repeated += repeated_tasks(
                items, task_identities(env, [item.task_id for item in items])
            )
        except IdentitiesUnknown as reason:
            unknown.append(f"{env.name}: items were compared by their ids alone: {reason}")
    return tuple(repeated), tuple(unknown)


def _check_draws(cfg: RunConfig, splits: Splits) -> None:
    """Errors: ConfigError where one optimiser step could draw an item twice: equal keys give
    equal samples.
    """
    recipe, asked = RECIPES[cfg.algorithm.recipe], cfg.rollout.items_per_step
    rounds = 1 + (cfg.algorithm.max_refills if recipe.dynamic_sampling else 0)
    most = train_stream(cfg, splits, {}).most_distinct()
    if recipe.loop == "rl" and asked * rounds > most:
        refills = f" x {rounds} rounds (algorithm.max_refills)" if rounds > 1 else ""
        raise ConfigError(
            f"rollout.items_per_step {asked}{refills} is more than the {most} items that"
            f" {len(splits.train)} train items of {cfg.env_names} give without one twice (a third"
            " of a pass): the same item twice in a step has the same samples, token for token;"
            f" lower it to {most // rounds}, or add items"
        )


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


def run_step(
    name: str,
    cfg: RunConfig,
    *,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Bring one step to its end: find it done, resume it, or run it.

    environment: offer_expert -> endpoints of running servers; without it the step starts and ends
    its own.
    Errors: ConfigError where the name is unknown or a parent is not done; LeaseHeld where another
    process runs the step; DigestMismatch where stored content is not what was committed.
    """
    table = steps_of(cfg)
    if name not in table:
        raise ConfigError(f"unknown step {name!r}; this configuration has: {', '.join(table)}")
    step, store = table[name], open_store(cfg)
    done = finished(cfg, store)
    missing = [parent for parent in step.parents if parent not in done]
    if missing:
        raise ConfigError(
            f"step {name} needs {', '.join(missing)} first; run `agentgym step {missing[0]}`"
        )
    if name in done:
        confirm(cfg, store, step, done[name])
        return Outcome(step, done[name], "done")
    parents = {parent: done[parent] for parent in step.parents}
    key = key_of(step, cfg, done)
    if cfg.compute == "ray-job" and name not in STAYS_HERE:
        from agentgym.deploy.rayjobs import run_as_job

        head = store.head(name, key)
        manifest = run_as_job(name, cfg, store, run_key=run_key(cfg), key=key)
        confirm(cfg, store, step, manifest)
        return Outcome(step, manifest, "resumed" if head else "ran", head.seq + 1 if head else None)
    with store.open(name, key) as writer:
        head = writer.head
        if head is not None and head.done:  # another process was faster
            confirm(cfg, store, step, head)
            return Outcome(step, head, "done")
        for manifest in (*parents.values(), *((head,) if head else ())):
            store.verify(manifest)
        ctx = StepContext(
            cfg=cfg,
            step=name,
            config=semantic_of(step, cfg),
            store=store,
            writer=writer,
            parents=parents,
            environment=environment or (lambda expert: local_environment(cfg, expert)),
            progress=progress or NoProgress(),
            on_commit=Paced(lambda manifest: deliver(cfg, store, step, manifest)),
        )
        logger.info(
            "step %s (%s): %s",
            name,
            key[:12],
            f"resumes after commit {head.seq}" if head else "starts",
        )
        with reaching(cfg.tracking_uri):  # steps that speak to MLflow themselves
            manifest = step.run(ctx)
    return Outcome(step, manifest, "resumed" if head else "ran", head.seq + 1 if head else None)


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


def run_with_parents(
    name: str, cfg: RunConfig, *, wait_s: float = 0.0, progress: Progress | None = None
) -> list[Outcome]:
    """Bring a step and all that it needs to their end, with one environment server that starts
    when it is first needed.

    wait_s and errors: see `run_when_free`.
    """
    with contextlib.ExitStack() as stack:
        running: list[Endpoints] = []  # once there are servers

        def environment(expert: bool) -> AbstractContextManager[Endpoints]:
            if expert:
                return local_environment(cfg, True)
            if not running:
                running.append(stack.enter_context(local_environment(cfg, False)))
            return contextlib.nullcontext(running[0])

        steps = with_parents(cfg, name)
        return [
            run_when_free(step, cfg, wait_s=wait_s, environment=environment, progress=progress)
            for step in steps
        ]


def run_when_free(
    name: str,
    cfg: RunConfig,
    *,
    wait_s: float,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """`run_step`, after up to `wait_s` seconds for another process that is at work on the step;
    then LeaseHeld.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return run_step(name, cfg, environment=environment, progress=progress)
        except LeaseHeld:
            if time.monotonic() >= deadline:
                raise
            time.sleep(WAIT_POLL_S)


def confirm(cfg: RunConfig, store: RunStore, step: Step, manifest: Manifest) -> None:
    """A finished step is only as good as its bytes: verify them, and bring MLflow up to date.
    Errors: DigestMismatch.
    """
    store.verify(manifest)
    deliver(cfg, store, step, manifest)


@contextlib.contextmanager
def local_environment(cfg: RunConfig, expert: bool) -> Iterator[Endpoints]:
    """The configured servers of each environment, or one local process for as long as it is
    needed.
    """
    from agentgym.deploy.local import local_env

    with contextlib.ExitStack() as stack:
        endpoints: dict[str, Sequence[str]] = {}
        for env in cfg.envs:
            if env.endpoints and not expert:
                # for workers elsewhere
                endpoints[env.name] = [Endpoint(url, token_of(url)) for url in env.endpoints]
            else:
                log_path = cfg.state_dir / "logs" / f"{env.name}{'-expert' if expert else ''}.log"
                endpoints[env.name] = stack.enter_context(
                    local_env(env, expert=expert, log_path=log_path)
                )
        yield endpoints


def deliver(cfg: RunConfig, store: RunStore, step: Step, manifest: Manifest) -> None:
    """Bring MLflow up to the last commit.
    A small mark spares the import when nothing is new; points never repeat.

    Errors: LedgerUnavailable.
    """
    if METRICS not in manifest.records and not manifest.done:
        return
    mark = cfg.state_dir / "delivered" / run_key(cfg)[:16] / f"{step.name}-{manifest.key[:16]}"
    if mark.is_file() and mark.read_text() == _mark(cfg, manifest):
        return
    deliver_step(cfg, store, manifest, run_key(cfg), title=step.title, headline=step.headline)
    if step.name == "register":
        from agentgym.evaluation.publish import confirm_registration

        with reaching(cfg.tracking_uri):
            confirm_registration(cfg, store, manifest, finished(cfg, store), run_key(cfg))
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(_mark(cfg, manifest))


def _mark(cfg: RunConfig, manifest: Manifest) -> str:
    return sha256(f"{manifest.digest} {manifest.created_at!r} {ledger_identity(cfg)}".encode())


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


def _initialise(ctx: StepContext) -> Manifest:
    from agentgym.training.sft import initialise

    return initialise(ctx)


def _warm_start(ctx: StepContext) -> Manifest:
    from agentgym.training.sft import warm_start

    return warm_start(ctx)


def pointer(cfg: RunConfig, outcome: Outcome) -> str:
    """What DVC keeps of a step: where its result lies, its digests, its numbers and their
    course.
    Never weights.
    """
    manifest, store = outcome.manifest, open_store(cfg)
    identity = {
        "step": manifest.step,
        "key": manifest.key,
        "digest": manifest.digest,
        "store": store.root,
    }
    identity |= {"records_digest": manifest.records_digest, "run": run_key(cfg)}
    # in a list, because `dvc metrics` takes for a metric whatever is not in one
    content = {"manifest": [identity], "results": manifest.results, "curve": curve(store, manifest)}
    return json.dumps(content, indent=1, sort_keys=True)
