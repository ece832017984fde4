"""Recipes that learn from a set fixed at the start of each stage: demonstrations (sft), pairs
(dpo), successes (agent_evol).

dpo and agent_evol first sample train items with the policy the stage begins with, at the
stage's horizon; the episodes are committed before any training. All three then take the
stage's optimizer steps with the same learner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from agentgym.algorithms.batch import learnable, to_batch
from agentgym.algorithms.recipe import differ, recipe_of
from agentgym.compute.placement import Engine, Learner, open_compute, play_validation
from agentgym.config import ExplorationConfig, OptimizerConfig, PreferenceConfig, RunConfig
from agentgym.data.items import Splits, splits_from_json, train_stream
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import has_weights
from agentgym.models.chat import ChatRenderer
from agentgym.models.checkpoint import OPTIMIZER, Checkpoint, load_checkpoint
from agentgym.models.model import set_threads
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.collect import rollout_metrics, success_share, validation_metrics
from agentgym.rollouts.engine import RolloutRequest
from agentgym.steps.context import StepContext, now_ms
from agentgym.steps.step import Stage
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.training.demonstrations import tokenized_demonstrations
from agentgym.training.observer import clock_of
from agentgym.training.sft import demo_indices
from agentgym.types import Item, Trajectory

logger = logging.getLogger(__name__)

COMMIT_EVERY = 10  # optimizer steps; steps with validation are also committed
Dataset = Sequence[tuple[Trajectory, ...]]


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Play what the recipe explores, if anything, train from the last commit, return the final.
    Errors: AlarmStop; RuntimeError if exploration found nothing to learn from.
    """
    cfg, start = ctx.cfg, ctx.checkpoint
    set_threads(cfg.learner_settings.threads)
    # a last commit without weights is from exploration
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
        ctx.progress.start(f"stage {stage.index} · {cfg.algorithm.recipe}", stage.num_steps)
        ctx.progress.advance(step + 1 - stage.first_step)
        clock = clock_of(cfg, learner)
        while step < stage.last_step:
            step += 1
            clock.lap("commit")  # of the previous step
            metrics, num_tokens = learn(step)
            clock.lap("update")
            # CPU time of this process, in the first step with exploration; without validation
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
    """Return True if training calls `StepContext.step_taken`, which may commit, after this step."""
    is_validated = bool(cfg.validation.every and step % cfg.validation.every == 0)
    return is_validated or step == stage.last_step or step % COMMIT_EVERY == 0


def optimizer_of(cfg: RunConfig) -> OptimizerConfig:
    """Return the recipe's optimizer settings; dpo has its own learning rate."""
    algorithm = cfg.algorithm
    if not isinstance(algorithm, PreferenceConfig):
        return cfg.optimizer
    return cfg.optimizer.model_copy(update={"lr": algorithm.lr})


def first_rate_step(cfg: RunConfig, stage: Stage) -> int:
    """Return the optimizer step before the first one of the learning rate's schedule.

    The schedule begins anew with each stage, but imitation alone has one schedule for all stages.
    """
    return stage.first_step - 1 if isinstance(cfg.algorithm, ExplorationConfig) else 0


def rate_steps(cfg: RunConfig, stage: Stage) -> int:
    """Return the number of optimizer steps in the learning rate's schedule."""
    explores = isinstance(cfg.algorithm, ExplorationConfig)
    return stage.num_steps if explores else sum(cfg.horizon.stage_steps)


def explored_items(cfg: RunConfig, splits: Splits, start: Manifest) -> list[Item]:
    """Return the train items that a stage begun at `start` explores, in order; none for sft."""
    algorithm = cfg.algorithm
    if not isinstance(algorithm, ExplorationConfig):
        return []
    return train_stream(cfg, splits, start.state).next(algorithm.num_items)


def preference_pairs(
    trajectories: Sequence[Trajectory], *, per_item: int, seed: int, step: int
) -> list[tuple[Trajectory, Trajectory]]:
    """Return pairs (preferred, other) of one item with a higher and a lower reward.

    At most `per_item` pairs of an item, drawn at random. Equal rewards make no pair, whatever the
    lengths: a cost of delay belongs in the reward.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step + 2_000_000]))
    pairs: list[tuple[Trajectory, Trajectory]] = []
    for group in _by_item(trajectories):
        candidates = [
            (one, other)
            for one in group
            for other in group
            if differ(other.reward or 0.0, one.reward or 0.0)
        ]
        pairs += [
            candidates[index] for index in sorted(generator.permutation(len(candidates))[:per_item])
        ]
    return pairs


def successes(trajectories: Sequence[Trajectory], *, per_item: int) -> list[Trajectory]:
    """Return each item's first `per_item` successes, so that easy items do not crowd out others."""
    return [
        trajectory
        for group in _by_item(trajectories)
        for trajectory in [member for member in group if member.success][:per_item]
    ]


def dataset_of(
    cfg: RunConfig,
    stage: Stage,
    episodes: Sequence[Trajectory],
    recorded: Sequence[Trajectory] = (),
) -> list[tuple[Trajectory, ...]]:
    """Return the stage's training set from its own episodes, without failed ones and, if the recipe
    masks them, truncated ones.
    Result: pairs for dpo, successes as tuples of one for agent_evol, nothing for sft.
    recorded: trajectories of others, which dpo compares with each other and with its own episodes
    of the same item.
    """
    algorithm = cfg.algorithm
    if not isinstance(algorithm, ExplorationConfig):
        return []
    truncated = algorithm.truncated or recipe_of(algorithm.recipe).truncated
    usable, others = (learnable(those, truncated=truncated) for those in (episodes, recorded))
    if not algorithm.loop.prefers:
        return [(trajectory,) for trajectory in successes(usable, per_item=algorithm.per_item)]
    # a batch needs one temperature
    alike = [replace(episode, temperature=cfg.rollout.temperature) for episode in others]
    return list(
        preference_pairs(
            [*usable, *alike], per_item=algorithm.per_item, seed=cfg.seed, step=stage.first_step
        )
    )


def exploration_metrics(
    episodes: Sequence[Trajectory], dataset: Sequence[tuple[Trajectory, ...]]
) -> dict[str, float]:
    """Return metrics of a stage's own episodes and training set, for its first optimizer step."""
    return rollout_metrics(episodes) | {"rollout/num_kept": float(len(dataset))}


def _recorded(ctx: StepContext, renderer: ChatRenderer) -> list[Trajectory]:
    """Return the recorded trajectories that dpo compares with; other recipes have none."""
    if not ctx.cfg.algorithm.loop.prefers or ctx.cfg.warm_start.source != "trajectories":
        return []
    return tokenized_demonstrations(ctx.cfg, ctx.store, ctx.demonstrations, renderer)


def _explore(
    ctx: StepContext, stage: Stage, engine: Engine, items: Sequence[Item], position: int
) -> list[Trajectory]:
    """Return the episodes on a stage's items by the policy the stage begins with; none for sft.

    Committed ones are read; the others are played and committed in chunks.
    """
    cfg, algorithm = ctx.cfg, ctx.cfg.algorithm
    if not isinstance(algorithm, ExplorationConfig):
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
    for begin in range(first, len(items), algorithm.chunk_items):
        chunk = items[begin : begin + algorithm.chunk_items]
        request = RolloutRequest(
            chunk,
            num_samples=cfg.rollout.group_size,
            step=stage.first_step,
            max_turns=stage.max_turns,
            temperature=cfg.rollout.temperature,
            seed=cfg.seed,
        )
        collected = engine.collect(request, progress=ctx.progress.advance)
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
    ctx: StepContext, stage: Stage, start: Manifest, last: Manifest | None, checkpoint: Checkpoint
) -> LearnerPlan:
    """Return the plan of the learner as the last commit left it.

    A stage begins with a new optimizer, agent_evol also with the weights of the warm start. sft
    keeps weights and optimizer from stage to stage.
    """
    cfg = ctx.cfg
    begins_anew = cfg.algorithm.loop.begins_anew and last is None
    weights_from = ctx.start if begins_anew else last or start
    keeps = cfg.algorithm.loop.keeps_optimizer and "stream_position" in start.state
    optimizer_from = last or (start if keeps else None)
    return LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.policy(weights_from),
        adapter=ctx.adapter(weights_from),
        optimizer=optimizer_of(cfg),
        settings=cfg.learner_settings,
        total_steps=rate_steps(cfg, stage),
        # the policy that sampled the pairs; the learner of a resumed stage has other weights
        reference=ctx.policy(start) if cfg.algorithm.loop.prefers else None,
        optimizer_states={}
        if optimizer_from is None
        else {OPTIMIZER: ctx.tensors(optimizer_from, OPTIMIZER)},
    )


def nothing_to_learn(cfg: RunConfig, stage: Stage, episodes: Sequence[Trajectory]) -> RuntimeError:
    """Return the error for a stage whose own episodes contain nothing to learn from."""
    assert isinstance(cfg.algorithm, ExplorationConfig)
    prefers = cfg.algorithm.loop.prefers
    lacking = "pair of different rewards" if prefers else "success"
    return RuntimeError(
        f"stage {stage.index}: no {lacking} among {len(episodes)} episodes of"
        f" {cfg.algorithm.num_items} items at max_turns {stage.max_turns} (success"
        f" {success_share(episodes):.2f}); raise algorithm.num_items or rollout.group_size, take"
        " easier or harder items, or another horizon"
    )


# optimizer step -> (metrics, number of tokens): takes this step. Its data depends on the number of
# the step alone.
Update = Callable[[int], tuple[dict[str, float], int]]


def _learning(
    ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset, renderer: ChatRenderer
) -> Update:
    if ctx.cfg.algorithm.loop.prefers:
        return _preferring(ctx, stage, learner, dataset)
    return _imitating(ctx, stage, learner, dataset, renderer)


def _preferring(ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset) -> Update:
    """Return the update of direct preference optimization on the pairs; the reference scores them
    once and is dropped.
    """
    cfg, algorithm, before = ctx.cfg, ctx.cfg.algorithm, first_rate_step(ctx.cfg, stage)
    assert isinstance(algorithm, PreferenceConfig)
    pairs = to_batch([trajectory for pair in dataset for trajectory in pair])
    pairs = replace(pairs, logprobs=learner.score_reference(pairs))
    learner.drop_reference()
    size = min(algorithm.pairs_per_step, len(dataset))

    def prefer(step: int) -> tuple[dict[str, float], int]:
        chosen = torch.tensor(demo_indices(cfg.seed, step - before, len(dataset), size))
        batch = pairs.select(torch.stack([2 * chosen, 2 * chosen + 1], 1).flatten())
        metrics = learner.dpo_step(
            batch,
            batch.logprobs,
            beta=algorithm.beta,
            label_smoothing=algorithm.label_smoothing,
            step=step - before,
        )
        return metrics, batch.num_tokens

    return prefer


def _imitating(
    ctx: StepContext, stage: Stage, learner: Learner, dataset: Dataset, renderer: ChatRenderer
) -> Update:
    """Return the update of supervised learning on demonstrations and successes."""
    cfg, before = ctx.cfg, first_rate_step(ctx.cfg, stage)
    # learn at temperature 1, as in the warm start, also if the episodes were sampled at another
    demos = tokenized_demonstrations(cfg, ctx.store, ctx.demonstrations, renderer)
    imitated = [demo for demo in demos if demo.success]
    imitated += [played for group in dataset for played in group]
    pool = to_batch([replace(trajectory, temperature=1.0) for trajectory in imitated])
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
