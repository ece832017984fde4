"""Multi-turn reinforcement learning: generate, prepare experience, train; one stage of the curriculum at a time."""

from __future__ import annotations

import logging
import time

from agentgym.algorithms.batch import to_batch
from agentgym.algorithms.recipe import RECIPES
from agentgym.context import StepContext, now_ms
from agentgym.data import ItemStream, splits_from_json
from agentgym.rollouts.horizon import Stage, max_turns
from agentgym.rollouts.metrics import rollout_metrics
from agentgym.store.manifest import Manifest
from agentgym.tracking import Point
from agentgym.training.checkpoint import OPTIMISER, load_checkpoint
from agentgym.training.engine import open_engine
from agentgym.training.learner import Learner
from agentgym.training.model import set_threads

logger = logging.getLogger(__name__)


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Train from the last commit, or from the parent's weights, to the stage's last optimiser step; commit each step."""
    set_threads()
    cfg = ctx.cfg
    parent = next(manifest for name, manifest in ctx.parents.items() if name != "prepare")
    start = ctx.head or parent
    splits = splits_from_json(ctx.read(ctx.parents["prepare"], "splits.json"))
    checkpoint = load_checkpoint(ctx.store, start)
    learner = Learner(checkpoint.model, cfg.optimiser, total_steps=sum(cfg.horizon.stage_steps))
    step = int(start.state["global_step"])
    if "stream_position" in start.state:  # a stage went before; the warm start's optimiser is another one
        learner.load_optimiser(ctx.read(start, OPTIMISER))
    stream = ItemStream(splits.train, seed=cfg.seed, position=int(start.state.get("stream_position", 0)))
    truncated = cfg.algorithm.truncated or RECIPES[cfg.algorithm.recipe].truncated
    ctx.progress.start(f"stage {stage.index} · max_turns {stage.max_turns}", stage.last_step - stage.first_step + 1)
    ctx.progress.advance(step + 1 - stage.first_step)

    with ctx.environment(False) as endpoints, open_engine(cfg, checkpoint, endpoints, version=step) as engine:
        while step < stage.last_step:
            step += 1
            began, cpu_began = time.perf_counter(), time.process_time()

            # generate
            turns = max_turns(cfg.horizon, step)
            items = stream.next(cfg.rollout.items_per_step)
            trajectories = engine.collect(
                items, num_samples=cfg.rollout.group_size, step=step, max_turns=turns, temperature=cfg.rollout.temperature, seed=cfg.seed
            )
            generated = time.perf_counter()

            # prepare experience
            batch = to_batch(trajectories, truncated=truncated)

            # train
            metrics = rollout_metrics(trajectories) | learner.update(batch, cfg.algorithm, step=step, seed=cfg.seed)
            updated = time.perf_counter()
            metrics["sync/canary_max_abs"] = engine.publish(learner, step)
            metrics["time/cpu_s"] = time.process_time() - cpu_began  # of this process: neither servers nor validation
            validation = []
            if cfg.validation.every and step % cfg.validation.every == 0:
                validation = engine.collect(
                    splits.validation[: cfg.validation.num_items],
                    num_samples=1,
                    step=step,
                    max_turns=cfg.validation.max_turns,
                    temperature=cfg.validation.temperature,
                    seed=cfg.seed,
                )
                metrics["validation/success"] = rollout_metrics(validation)["rollout/success"]
            metrics |= {
                "time/generate_s": generated - began,
                "time/update_s": updated - generated,
                "time/step_s": time.perf_counter() - began,
            }
            manifest = ctx.commit(
                done=step == stage.last_step,
                state={
                    "global_step": step,
                    "stream_position": stream.position,
                    "consumed": [item.item_id for item in items],
                    "max_turns": turns,
                },
                blobs={**checkpoint.blobs(), OPTIMISER: learner.optimiser_blob()},
                points=[Point(step, now_ms(), metrics)],
                trajectories=[*trajectories, *validation],
            )
            logger.info("step %d: success %.2f in %.1f s", step, metrics["rollout/success"], metrics["time/step_s"])
            ctx.progress.advance(1, f"success {metrics['rollout/success']:.2f}")
    return manifest
