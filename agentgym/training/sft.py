"""The warm start: supervised learning on demonstrations, which stands in for a pretrained model."""

from __future__ import annotations

import logging

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.compute.placement import open_learner
from agentgym.learner.plan import LearnerPlan
from agentgym.models.checkpoint import OPTIMIZER, load_checkpoint
from agentgym.models.model import set_threads
from agentgym.steps.context import StepContext, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.training.demonstrations import tokenized_demonstrations
from agentgym.training.speed import clock_of

logger = logging.getLogger(__name__)

COMMIT_EVERY = 20  # optimizer steps


def warm_start(ctx: StepContext) -> Manifest:
    """Supervised learning on the action tokens of successful demonstrations."""
    set_threads(ctx.cfg.compute_threads)
    settings = ctx.cfg.warm_start
    start = ctx.head or ctx.checkpoint
    checkpoint = load_checkpoint(ctx.store, start)
    fitting = tokenized_demonstrations(ctx.cfg, ctx.store, ctx.demonstrations, checkpoint.renderer)
    num_too_long = int(ctx.demonstrations.results["num_played"]) - len(fitting)
    if num_too_long:
        logger.warning(
            "%d of %d demonstrations are left out: they do not fit model.context_tokens %d",
            num_too_long,
            num_too_long + len(fitting),
            ctx.cfg.model.context_tokens,
        )
    demos = [demo for demo in fitting if demo.success]
    step = int(start.state.get("sft_step", 0))
    plan = LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.policy(start),
        adapter=ctx.adapter(start) if ctx.cfg.adapts_warm_start else None,
        optimizer=settings.optimizer,
        settings=ctx.cfg.learner,
        total_steps=settings.steps,
        optimizer_states=ctx.tensors_of(start, OPTIMIZER),
    )
    ctx.progress.start("warm start", settings.steps)
    ctx.progress.advance(step)
    points: list[Point] = []
    with open_learner(ctx.cfg, plan) as learner:
        clock = clock_of(ctx.cfg, learner)
        while step < settings.steps:
            step += 1
            clock.lap("commit")  # of the step before
            indices = demo_indices(ctx.cfg.seed, step, len(demos), settings.batch_size)
            batch = to_batch([demos[index] for index in indices])
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


def demo_indices(seed: int, step: int, num_demos: int, batch_size: int) -> list[int]:
    """Which demonstrations optimizer step 1, 2, ... learns from: epochs of seeded shuffles, a
    pure function of the step.
    """
    first = (step - 1) * batch_size
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(first + len(indices), num_demos)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch + 1_000_000])).permutation(
            num_demos
        )
        indices += order[offset : offset + batch_size - len(indices)].tolist()
    return indices
