"""The warm start: supervised learning on demonstrations, as a substitute for a pretrained model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from agentgym.algorithms.batch import Batch, to_batch
from agentgym.compute.placement import open_learner
from agentgym.config import RunConfig
from agentgym.learner.start import LearnerPlan
from agentgym.models.checkpoint import OPTIMIZER, Checkpoint, load_checkpoint
from agentgym.models.model import set_threads
from agentgym.steps.context import StepContext, StepReader, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.training.demonstrations import tokenized_demonstrations
from agentgym.training.observer import clock_of
from agentgym.types import Trajectory

logger = logging.getLogger(__name__)

COMMIT_EVERY = 20  # optimizer steps


def warm_start(ctx: StepContext) -> Manifest:
    """Train on the actions of successful demonstrations, from the last commit; return the final."""
    set_threads(ctx.cfg.learner_settings.threads)
    settings, start = ctx.cfg.warm_start, ctx.head or ctx.checkpoint
    checkpoint = load_checkpoint(ctx.store, start)
    demos, num_too_long = learnable(ctx, checkpoint)
    if num_too_long:
        logger.warning(
            "%d of %s demonstrations are left out: they do not fit model.context_tokens %d",
            num_too_long,
            ctx.demonstrations.results["num_played"],
            ctx.cfg.model.context_tokens,
        )
    step = int(start.state.get("sft_step", 0))
    plan = plan_warm_start(ctx, start, checkpoint)
    ctx.progress.start("warm start", settings.steps)
    ctx.progress.advance(step)
    points: list[Point] = []
    with open_learner(ctx.cfg, plan) as learner:
        clock = clock_of(ctx.cfg, learner)
        while step < settings.steps:
            step += 1
            clock.lap("commit")  # of the previous step
            batch = batch_at(ctx.cfg, demos, step)
            metrics = learner.sft_step(batch, step=step)
            clock.lap("update")
            metrics |= clock.step(batch.num_tokens, metrics)
            points.append(Point(step, now_ms(), metrics))
            ctx.progress.advance(1, f"loss {metrics['sft/loss']:.2f}")
            if step % COMMIT_EVERY == 0 or step == settings.steps:
                manifest = ctx.step_taken(
                    step,
                    done=step == settings.steps,
                    state={"global_step": 0, "sft_step": step},
                    files={**checkpoint.files(), **plan.files()},
                    snapshot=learner.snapshot,
                    results={"loss": metrics["sft/loss"], "num_too_long": num_too_long},
                    points=points,
                )
                points = []
    assert manifest is not None  # of the last step
    return manifest


def learnable(reader: StepReader, checkpoint: Checkpoint) -> tuple[list[Trajectory], int]:
    """Return the successful demonstrations that fit, and the number of those that are too long."""
    demonstrations = reader.demonstrations
    fitting = tokenized_demonstrations(
        reader.cfg, reader.store, demonstrations, checkpoint.renderer
    )
    demos = [demo for demo in fitting if demo.success]
    return demos, int(demonstrations.results["num_played"]) - len(fitting)


def plan_warm_start(reader: StepReader, start: Manifest, checkpoint: Checkpoint) -> LearnerPlan:
    """Return the plan of the learner as the commit `start` left it."""
    cfg = reader.cfg
    return LearnerPlan(
        architecture=checkpoint.architecture,
        weights=reader.policy(start),
        adapter=reader.adapter(start) if cfg.adapts_warm_start else None,
        optimizer=cfg.warm_start.optimizer,
        settings=cfg.learner_settings,
        total_steps=cfg.warm_start.steps,
        optimizer_states=reader.tensors_of(start, OPTIMIZER),
    )


def batch_at(cfg: RunConfig, demos: Sequence[Trajectory], step: int) -> Batch:
    """Return the demonstrations of optimizer step `step` (from 1) as a batch."""
    indices = demo_indices(cfg.seed, step, len(demos), cfg.warm_start.batch_size)
    return to_batch([demos[index] for index in indices])


def demo_indices(seed: int, step: int, num_demos: int, batch_size: int) -> list[int]:
    """Return the indices of optimizer step `step` (from 1), from a seeded shuffle of each epoch."""
    first = (step - 1) * batch_size
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(first + len(indices), num_demos)
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch + 1_000_000]))
        order = generator.permutation(num_demos)
        indices += order[offset : offset + batch_size - len(indices)].tolist()
    return indices
