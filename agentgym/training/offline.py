"""Recipes that learn from a set fixed at the start of each stage: demonstrations (sft), pairs
(dpo), successes (agent_evol).

dpo and agent_evol first sample train items with the policy the stage begins with, at the stage's
horizon; the episodes are committed before anything is learned from them.
All three then take the stage's optimizer steps on the one learner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from agentgym.algorithms.batch import learnable, to_batch
from agentgym.algorithms.recipe import recipe_of
from agentgym.algorithms.signal import differ
from agentgym.compute.placement import (
    Engine,
    Learner,
    open_compute,
    play_validation,
)
from agentgym.config import ExplorationConfig, OptimizerConfig, PreferenceConfig, RunConfig
from agentgym.data.items import Splits, splits_from_json, train_stream
from agentgym.learner.plan import LearnerPlan
from agentgym.models.chat import ChatRenderer
from agentgym.models.checkpoint import (
    OPTIMIZER,
    Checkpoint,
    has_weights,
    load_checkpoint,
)
from agentgym.models.model import set_threads
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.horizon import Stage
from agentgym.rollouts.metrics import rollout_metrics, success_share, validation_metrics
from agentgym.steps.context import StepContext, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.training.demonstrations import demonstrations, tokenized_demonstrations
from agentgym.training.sft import demo_indices
from agentgym.training.speed import clock_of
from agentgym.types import Item, Trajectory

logger = logging.getLogger(__name__)

COMMIT_EVERY = 10  # optimizer steps; steps with validation are committed, too
Dataset = Sequence[tuple[Trajectory, ...]]


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Explore where the recipe does, then train to the stage's last step; from its last commit."""
    set_threads(ctx.cfg.learner_settings.threads)
    cfg = ctx.cfg
    start = ctx.checkpoint
    # else it still explores
    trained = ctx.head if ctx.head is not None and has_weights(ctx.head) else None
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    checkpoint = load_checkpoint(ctx.store, trained or start)
    items = explored_items(cfg, splits, start)
    position = int(start.state.get("stream_position", 0)) + len(items)
    step = int((trained or start).state["global_step"])
    points: list[Point] = []

    cpu_began = time.process_time()
    plan = _plan_learner(ctx, stage, start, trained, checkpoint)
    with (
        ctx.environment(False) as endpoints,
        open_compute(cfg, plan, checkpoint, endpoints, version=step) as (learner, engine),
    ):
        episodes = _explore(ctx, stage, engine, items, position - len(items))
        dataset = dataset_of(cfg, stage, episodes, _recorded(ctx, checkpoint.renderer))
        if episodes and not dataset:
            raise nothing_to_learn(cfg, stage, episodes)
        learn = _learning(ctx, stage, learner, dataset, checkpoint.renderer)
        ctx.progress.start(
            f"stage {stage.index} · {cfg.algorithm.recipe}", stage.last_step - stage.first_step + 1
        )
        ctx.progress.advance(step + 1 - stage.first_step)
        clock = clock_of(cfg, learner)
        while step < stage.last_step:
            step += 1
            clock.lap("commit")  # of the step before
            metrics, num_tokens = learn(step)
            clock.lap("update")
            # of this process, the first step with exploration; no validation
            metrics["time/cpu_s"] = time.process_time() - cpu_began
            if episodes and step == stage.first_step:
                metrics |= exploration_metrics(episodes, dataset)
            validation: list[Trajectory] = []
            if cfg.validation.every and step % cfg.validation.every == 0:
                metrics["sync/canary_rms"] = engine.publish(learner, step)
                clock.lap("publish")
                validation = play_validation(cfg, engine, splits.validation, step)
                metrics |= validation_metrics(validation)
                clock.lap("validate")
            metrics |= clock.step(num_tokens, metrics)
            cpu_began = time.process_time()
            points.append(Point(step, now_ms(), metrics))
            if commits_at(cfg, stage, step):
                manifest = ctx.step_taken(
                    step,
                    done=step == stage.last_step,
                    state={
                        "global_step": step,
                        "stream_position": position,
                        "consumed": [],
                        "max_turns": stage.max_turns,
                    },
                    files={**checkpoint.files(), **plan.files()},
                    snapshot=learner.snapshot,
                    points=points,
                    trajectories=validation,
                )
                points = []
            loss = next(value for name, value in metrics.items() if name.endswith("/loss"))
            ctx.progress.advance(1, f"loss {loss:.2f}")
    assert manifest is not None  # of the last step
    return manifest


def commits_at(cfg: RunConfig, stage: Stage, step: int) -> bool:
    """Whether an optimizer step of the stage ends in a commit."""
    return (
        step == stage.last_step
        or step % COMMIT_EVERY == 0
        or bool(cfg.validation.every and step % cfg.validation.every == 0)
    )


def optimizer_of(cfg: RunConfig) -> OptimizerConfig:
    """The optimizer of the recipe: dpo has a rate of its own."""
    own = cfg.algorithm
    return (
        cfg.optimizer.model_copy(update={"lr": own.lr})
        if isinstance(own, PreferenceConfig)
        else cfg.optimizer
    )


def first_rate_step(cfg: RunConfig, stage: Stage) -> int:
    """The optimizer step before the first one of its schedule: each stage is a problem of its
    own, but imitation alone is one for all stages.
    """
    return stage.first_step - 1 if _explores(cfg) else 0


def rate_steps(cfg: RunConfig, stage: Stage) -> int:
    """How many optimizer steps the schedule of the learning rate is for."""
    return (
        stage.last_step - stage.first_step + 1 if _explores(cfg) else sum(cfg.horizon.stage_steps)
    )


def explored_items(cfg: RunConfig, splits: Splits, start: Manifest) -> list[Item]:
    """The train items of a stage that begins at `start`, in the stream's order."""
    own = cfg.algorithm
    if not isinstance(own, ExplorationConfig):
        return []
    return train_stream(cfg, splits, start.state).next(own.num_items)


def _explores(cfg: RunConfig) -> bool:
    return isinstance(cfg.algorithm, ExplorationConfig)


def preference_pairs(
    trajectories: Sequence[Trajectory], *, per_item: int, seed: int, step: int
) -> list[tuple[Trajectory, Trajectory]]:
    """(preferred, other) of one item with a higher and a lower reward; at most `per_item` of an
    item, drawn at random.

    Equal rewards make no pair, whatever the lengths: what a delay costs is for the reward to say.
    """
    drawn = np.random.Generator(np.random.Philox(key=[seed, step + 2_000_000]))
    pairs: list[tuple[Trajectory, Trajectory]] = []
    for group in _by_item(trajectories):
        found = [
            (one, other)
            for one in group
            for other in group
            if differ(other.reward or 0.0, one.reward or 0.0)
        ]
        pairs += [found[index] for index in sorted(drawn.permutation(len(found))[:per_item])]
    return pairs


def successes(trajectories: Sequence[Trajectory], *, per_item: int) -> list[Trajectory]:
    """The first `per_item` successful ones of each item, so that easy items do not crowd out
    the others.
    """
    return [
        trajectory
        for group in _by_item(trajectories)
        for trajectory in [each for each in group if each.success][:per_item]
    ]


def dataset_of(
    cfg: RunConfig,
    stage: Stage,
    episodes: Sequence[Trajectory],
    recorded: Sequence[Trajectory] = (),
) -> list[tuple[Trajectory, ...]]:
    """What the stage learns from its own episodes: pairs (dpo), successes as tuples of one
    (agent_evol), nothing (sft).

    recorded: trajectories of others, which dpo compares with each other and with its own episodes
    of the same item.
    """
    own = cfg.algorithm
    if not isinstance(own, ExplorationConfig):
        return []
    usable, theirs = (
        learnable(each, truncated=own.truncated or recipe_of(own.recipe).truncated)
        for each in (episodes, recorded)
    )
    if not own.loop.prefers:
        return [(trajectory,) for trajectory in successes(usable, per_item=own.per_item)]
    # one batch, one temperature
    alike = [replace(each, temperature=cfg.rollout.temperature) for each in theirs]
    return list(
        preference_pairs(
            [*usable, *alike], per_item=own.per_item, seed=cfg.seed, step=stage.first_step
        )
    )


def exploration_metrics(
    episodes: Sequence[Trajectory], dataset: Sequence[tuple[Trajectory, ...]]
) -> dict[str, float]:
    """Of a stage's own episodes and what is learned from them; logged at the stage's first
    optimizer step.
    """
    return rollout_metrics(episodes) | {"rollout/num_kept": float(len(dataset))}


def _recorded(ctx: StepContext, renderer: ChatRenderer) -> list[Trajectory]:
    """What others did, for dpo; agent_evol and sft imitate it as demonstrations."""
    if not ctx.cfg.algorithm.loop.prefers or ctx.cfg.warm_start.source != "trajectories":
        return []
    return tokenized_demonstrations(ctx.cfg, ctx.store, ctx.demonstrations, renderer)


def _explore(
    ctx: StepContext, stage: Stage, engine: Engine, items: Sequence[Item], position: int
) -> list[Trajectory]:
    """The episodes of the stage's first policy on all items: those committed earlier, and the
    rest, committed in chunks.
    """
    cfg, own = ctx.cfg, ctx.cfg.algorithm
    if not isinstance(own, ExplorationConfig):
        return []
    earlier = [
        commit
        for commit in ctx.store.history(ctx.step.name, ctx.writer.key)
        if commit.state["consumed"]
    ]
    episodes = [
        episode
        for commit in earlier
        for episode in decode_trajectories(ctx.read(commit, TRAJECTORIES))
    ]
    first = sum(len(commit.state["consumed"]) for commit in earlier)
    ctx.progress.start(
        f"stage {stage.index} · max_turns {stage.max_turns}", len(items) * cfg.rollout.group_size
    )
    ctx.progress.advance(len(episodes))
    for begin in range(first, len(items), own.chunk_items):
        chunk = items[begin : begin + own.chunk_items]
        collected = engine.collect(
            chunk,
            num_samples=cfg.rollout.group_size,
            step=stage.first_step,
            max_turns=stage.max_turns,
            temperature=cfg.rollout.temperature,
            seed=cfg.seed,
            progress=ctx.progress.advance,
        )
        ctx.commit(
            done=False,
            state={
                "global_step": stage.first_step - 1,
                "stream_position": position + begin + len(chunk),
                "consumed": [item.item_id for item in chunk],
                "max_turns": stage.max_turns,
            },
            blobs={},
            trajectories=collected,
        )
        episodes += collected
    return episodes


def _plan_learner(
    ctx: StepContext,
    stage: Stage,
    start: Manifest,
    trained: Manifest | None,
    checkpoint: Checkpoint,
) -> LearnerPlan:
    """As the last commit left it.
    A stage begins with a new optimizer, agent_evol with the weights of the warm start, too.

    sft goes on with weights and optimizer from stage to stage.
    """
    cfg = ctx.cfg
    anew = cfg.algorithm.loop.begins_anew and trained is None
    begun = ctx.start if anew else trained or start
    goes_on = cfg.algorithm.loop.keeps_optimizer and "stream_position" in start.state
    before = trained or (start if goes_on else None)
    return LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.policy(begun),
        adapter=ctx.adapter(begun),
        optimizer=optimizer_of(cfg),
        settings=cfg.learner_settings,
        total_steps=rate_steps(cfg, stage),
        # the policy that sampled the pairs; in a resumed stage the learner has moved on
        reference=ctx.policy(start) if cfg.algorithm.loop.prefers else None,
        optimizer_states={} if before is None else {OPTIMIZER: ctx.tensors(before, OPTIMIZER)},
    )


def nothing_to_learn(cfg: RunConfig, stage: Stage, episodes: Sequence[Trajectory]) -> RuntimeError:
    """What to say of a stage whose own episodes hold nothing that its recipe learns from."""
    assert isinstance(cfg.algorithm, ExplorationConfig)
    prefers = cfg.algorithm.loop.prefers
    lacking = "pair of different rewards" if prefers else "success"
    return RuntimeError(
        f"stage {stage.index}: no {lacking} among {len(episodes)} episodes of"
        f" {cfg.algorithm.num_items} items at max_turns {stage.max_turns} (success"
        f" {success_share(episodes):.2f}); raise algorithm.num_items or rollout.group_size, take"
        " easier or harder items, or another horizon"
    )


# optimizer step -> metrics and how many tokens were seen, having taken it; what a step learns from
# is a pure function of the step
Update = Callable[[int], tuple[dict[str, float], int]]


def _learning(
    ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset, renderer: ChatRenderer
) -> Update:
    if ctx.cfg.algorithm.loop.prefers:
        return _preferring(ctx, stage, learner, dataset)
    return _imitating(ctx, stage, learner, dataset, renderer)


def _preferring(ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset) -> Update:
    """Direct preference optimization of the pairs."""
    cfg, own, before = ctx.cfg, ctx.cfg.algorithm, first_rate_step(ctx.cfg, stage)
    assert isinstance(own, PreferenceConfig)
    pairs = to_batch([trajectory for pair in dataset for trajectory in pair])
    pairs = replace(pairs, logprobs=learner.score_reference(pairs))
    learner.drop_reference()
    size = min(own.pairs_per_step, len(dataset))

    def prefer(step: int) -> tuple[dict[str, float], int]:
        chosen = torch.tensor(demo_indices(cfg.seed, step - before, len(dataset), size))
        batch = pairs.select(torch.stack([2 * chosen, 2 * chosen + 1], 1).flatten())
        metrics = learner.dpo_step(
            batch,
            batch.logprobs,
            beta=own.beta,
            label_smoothing=own.label_smoothing,
            step=step - before,
        )
        return metrics, batch.num_tokens

    return prefer


def _imitating(
    ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset, renderer: ChatRenderer
) -> Update:
    """Supervised learning on the demonstrations, and on successes beside them."""
    cfg, before = ctx.cfg, first_rate_step(ctx.cfg, stage)
    # likelihood is that of the policy itself, as in the warm start, whatever temperature its
    # episodes were sampled at
    shown = [*demonstrations(ctx, renderer), *(played for group in dataset for played in group)]
    pool = to_batch([replace(trajectory, temperature=1.0) for trajectory in shown])
    # as many episodes as a step of reinforcement learning
    size = cfg.rollout.items_per_step * cfg.rollout.group_size

    def imitate(step: int) -> tuple[dict[str, float], int]:
        chosen = torch.tensor(demo_indices(cfg.seed, step - before, pool.num_sequences, size))
        batch = pool.select(chosen)
        return learner.sft_step(batch, step=step - before), batch.num_tokens

    return imitate


def _by_item(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.item.item_id, []).append(trajectory)
    return list(groups.values())
