"""Multi-turn reinforcement learning: generate, prepare experience, train; one stage of the
curriculum at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from agentgym.algorithms.batch import groups_with_signal, learnable, overlong_penalty, to_batch
from agentgym.algorithms.recipe import RECIPES
from agentgym.compute.placement import Engine, open_compute, play_validation
from agentgym.config import AlgorithmConfig, ConfigError, RunConfig
from agentgym.data.items import ItemStream, splits_from_json, train_stream
from agentgym.learner.plan import LearnerPlan
from agentgym.models.checkpoint import (
    CRITIC,
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    load_checkpoint,
)
from agentgym.models.model import set_threads
from agentgym.rollouts.horizon import HorizonState, Stage, advance, max_turns
from agentgym.rollouts.metrics import rollout_metrics, validation_metrics
from agentgym.rollouts.policies.engines import tolerance_of
from agentgym.steps.context import StepContext, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.types import Item, Learned, Trajectory

logger = logging.getLogger(__name__)

MAX_SKIPPED = 10  # optimizer steps in a row without an episode to learn from


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Train from the last commit, or from the parent's weights, to the stage's last optimizer
    step; commit each step.
    """
    set_threads()
    cfg = ctx.cfg
    start = ctx.head or next(
        manifest for name, manifest in ctx.parents.items() if name != "prepare"
    )
    splits = splits_from_json(ctx.read(ctx.parents["prepare"], "splits.json"))
    checkpoint = load_checkpoint(ctx.store, start)
    algorithm = with_limit(cfg, checkpoint)
    step, horizon = int(start.state["global_step"]), horizon_state(start)
    stream = train_stream(cfg, splits, start.state)
    skipped = 0
    ctx.progress.start(
        f"stage {stage.index} · max_turns {stage.max_turns}", stage.last_step - stage.first_step + 1
    )
    ctx.progress.advance(step + 1 - stage.first_step)

    with (
        ctx.environment(False) as endpoints,
        ThreadPoolExecutor(1) as ahead,
        open_compute(
            cfg, plan_learner(ctx, start, checkpoint), checkpoint, endpoints, version=step
        ) as (learner, engine),
    ):
        pending: Future[Rollouts] | None = None
        while step < stage.last_step:
            step += 1
            began, cpu_began = time.perf_counter(), time.process_time()

            # generate
            turns = max_turns(cfg.horizon, step, horizon)
            rollouts = pending.result() if pending else generate(cfg, engine, stream, step, turns)
            waited = time.perf_counter() - began
            metrics = rollout_metrics(rollouts.trajectories)
            horizon = advance(cfg.horizon, horizon, metrics.get("rollout/success", 0.0))
            if cfg.rollout.max_staleness and step < stage.last_step:
                pending = ahead.submit(
                    generate,
                    cfg,
                    engine,
                    stream,
                    step + 1,
                    max_turns(cfg.horizon, step + 1, horizon),
                )

            # prepare experience
            kept = learnable(rollouts.kept, truncated=algorithm.truncated or "zero")
            skipped = 0 if kept else skipped + 1
            if skipped > MAX_SKIPPED:
                raise RuntimeError(
                    f"step {step}: no episode to learn from in {skipped} optimizer steps in a row"
                    f" (recipe {algorithm.recipe}, truncated {algorithm.truncated}, success"
                    f" {metrics.get('rollout/success', 0.0):.2f}); every group had equal rewards or"
                    " was cut. Use easier or harder items, a longer horizon, or another recipe"
                )

            # train
            updating = time.perf_counter()
            metrics["actor/skipped_updates"] = float(not kept)
            if kept:
                batch = to_batch(kept, penalty=lambda trajectory: _penalty(cfg, trajectory))
                if algorithm.shuffle_rewards:
                    batch = batch.with_shuffled_outcomes(seed=cfg.seed, step=step)
                metrics |= learner.update(batch, algorithm, step=step, seed=cfg.seed)
            updated = time.perf_counter()
            metrics["sync/canary_max_abs"] = engine.publish(learner, step)
            # of this process: neither servers nor validation
            metrics["time/cpu_s"] = time.process_time() - cpu_began
            validation = []
            if cfg.validation.every and step % cfg.validation.every == 0:
                validation = play_validation(cfg, engine, splits.validation, step)
                metrics |= validation_metrics(validation)
            metrics |= {
                "sync/staleness_max": float(
                    max(
                        (
                            step - 1 - turn.version
                            for t in rollouts.trajectories
                            for turn in t.turns
                        ),
                        default=0,
                    )
                ),
                "time/generate_s": rollouts.seconds,
                "time/wait_s": waited,
                "time/update_s": updated - updating,
                "time/step_s": time.perf_counter() - began,
            }
            manifest = ctx.commit(
                done=step == stage.last_step,
                state={
                    "global_step": step,
                    "stream_position": rollouts.position,
                    "consumed": [item.item_id for item in rollouts.items],
                    "max_turns": turns,
                    "horizon": asdict(horizon),
                },
                blobs={**checkpoint.files(), **learner.blobs()},
                points=[Point(step, now_ms(), metrics)],
                trajectories=[*with_reasons(rollouts, kept), *validation],
            )
            logger.info(
                "step %d: success %.2f in %.1f s",
                step,
                metrics.get("rollout/success", 0.0),
                metrics["time/step_s"],
            )
            ctx.progress.advance(1, f"success {metrics.get('rollout/success', 0.0):.2f}")
    return manifest


@dataclass(frozen=True)
class Rollouts:
    """The episodes of one optimizer step."""

    items: list[Item]  # consumed from the stream, in order
    trajectories: list[Trajectory]  # of all of them, in admission order
    kept: list[Trajectory]  # those the recipe wants to learn from
    position: int  # of the stream after them
    seconds: float


def with_reasons(rollouts: Rollouts, learned: Sequence[Trajectory]) -> list[Trajectory]:
    """All of them, those that did not enter the loss with the reason. learned: what did."""
    entered, wanted = set(map(id, learned)), set(map(id, rollouts.kept))

    def reason(each: Trajectory) -> str:
        if not each.status.is_valid:
            return f"the environment failed: {each.status}"
        if id(each) not in wanted:
            return "its group had equal rewards"
        return "no action" if not any(each.action_mask) else f"cut: {each.status}"

    return [
        each if id(each) in entered else replace(each, learned=Learned(excluded=reason(each)))
        for each in rollouts.trajectories
    ]


def generate(cfg: RunConfig, engine: Engine, stream: ItemStream, step: int, turns: int) -> Rollouts:
    """`items_per_step` groups; with dynamic sampling those of equal rewards are replaced, as
    often as the recipe allows.
    """
    began, rollout, recipe = time.perf_counter(), cfg.rollout, RECIPES[cfg.algorithm.recipe]
    items: list[Item] = []
    trajectories: list[Trajectory] = []
    kept: list[Trajectory] = []
    missing, read_last = rollout.items_per_step, resolved(cfg).truncated == "bootstrap"
    for _ in range(1 + (cfg.algorithm.max_refills if recipe.dynamic_sampling else 0)):
        new = stream.next(missing)
        episodes = engine.collect(
            new,
            num_samples=rollout.group_size,
            step=step,
            max_turns=turns,
            temperature=rollout.temperature,
            seed=cfg.seed,
            read_last=read_last,
        )
        items += new
        trajectories += episodes
        kept += groups_with_signal(episodes) if recipe.dynamic_sampling else episodes
        missing = rollout.items_per_step - len({trajectory.item for trajectory in kept})
        if missing <= 0:
            break
    return Rollouts(items, trajectories, kept, stream.position, time.perf_counter() - began)


def plan_learner(ctx: StepContext, start: Manifest, checkpoint: Checkpoint) -> LearnerPlan:
    """The learner as `start` left it, with the critic and the reference its recipe needs.

    Errors: ConfigError where `start` was trained without the critic the recipe needs.
    """
    cfg, recipe = ctx.cfg, RECIPES[ctx.cfg.algorithm.recipe]
    # a stage went before; the warm start's optimizer is another one
    goes_on = "stream_position" in start.state
    critic = reference = None
    if recipe.needs_critic:
        critic = ctx.read(start, CRITIC) if CRITIC in start.blobs else b""
        if goes_on and not critic:
            raise ConfigError(
                f"recipe {cfg.algorithm.recipe} needs a critic, and {start.step} commit {start.seq}"
                f" has no {CRITIC}: it was trained without one; train that stage with this recipe"
                " too, or use a recipe without a critic"
            )
    if cfg.algorithm.kl_coef:
        base = next(
            manifest
            for name, manifest in ctx.parents.items()
            if name in ("warm-start", "initialize")
        )
        reference = ctx.read(base, WEIGHTS)
    states = {
        name: ctx.read(start, name)
        for name in (OPTIMIZER, CRITIC_OPTIMIZER)
        if goes_on and name in start.blobs
    }
    return LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.read(start, WEIGHTS),
        optimizer=cfg.optimizer,
        total_steps=sum(cfg.horizon.stage_steps),
        critic=critic,
        critic_lr=cfg.algorithm.critic_lr,
        reference=reference,
        optimizer_states=states,
    )


def resolved(cfg: RunConfig) -> AlgorithmConfig:
    """The algorithm's settings with the recipe's own where none is given."""
    recipe, algorithm = RECIPES[cfg.algorithm.recipe], cfg.algorithm
    longest = cfg.rollout.max_new_tokens * max(cfg.horizon.max_turns)
    own = {
        "truncated": recipe.truncated,
        "aggregation": recipe.aggregation,
        "constant_length": longest,
    }
    return algorithm.model_copy(
        update={name: value for name, value in own.items() if getattr(algorithm, name) is None}
    )


def with_limit(cfg: RunConfig, checkpoint: Checkpoint) -> AlgorithmConfig:
    """`resolved`, and how far engine and learner may be apart.
    Errors: ConfigError where the engine does not say so for weights of this dtype.
    """
    algorithm = resolved(cfg)
    limit = algorithm.max_mismatch_kl
    if limit is None:
        limit = tolerance_of(cfg.rollout.engine, checkpoint.dtype).mismatch_kl
    return algorithm.model_copy(update={"max_mismatch_kl": limit})


def horizon_state(manifest: Manifest) -> HorizonState:
    """As a commit recorded it; the beginning where there is none."""
    recorded = manifest.state.get("horizon", {})
    return HorizonState(int(recorded.get("level", 0)), tuple(recorded.get("recent", ())))


def _penalty(cfg: RunConfig, trajectory: Trajectory) -> float:
    if not RECIPES[cfg.algorithm.recipe].overlong:
        return 0.0
    return overlong_penalty(
        trajectory,
        context_tokens=cfg.model.context_tokens,
        buffer=cfg.algorithm.overlong_buffer,
        penalty=cfg.algorithm.overlong_penalty,
    )
