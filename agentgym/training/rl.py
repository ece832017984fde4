"""Multi-turn reinforcement learning of a stage: generate, prepare experience, train."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch, overlong_penalty, to_batch
from agentgym.compute.placement import open_compute, play_validation
from agentgym.config import (
    ActorCriticConfig,
    ConfigError,
    DiscountedConfig,
    DynamicSamplingConfig,
    PolicyGradientConfig,
    RunConfig,
)
from agentgym.data.items import splits_from_json, train_stream
from agentgym.learner.start import LearnerPlan
from agentgym.models.checkpoint import (
    CRITIC,
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    Checkpoint,
    load_checkpoint,
)
from agentgym.models.model import set_threads
from agentgym.rollouts.collect import rollout_metrics, success_share
from agentgym.rollouts.policies.engines import tolerance_of
from agentgym.steps.context import StepContext, StepReader
from agentgym.steps.step import Stage
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import AlarmStop
from agentgym.training.ahead import (
    Ahead,
    Rollouts,
    generation,
    horizon_state,
    resolved,
    state_after,
)
from agentgym.training.observer import Observer
from agentgym.types import Trajectory

logger = logging.getLogger(__name__)

# Number of episodes without a success after which a policy counts as hopeless: with 95 % confidence
# its success rate is below 2 %
MIN_HOPELESS = 150
MAX_SKIPPED = 10  # optimizer steps in a row without an episode to learn from


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Train to the stage's end, from its last commit or the parent's; return the final commit.
    Errors: AlarmStop; RuntimeError after more than MAX_SKIPPED steps in a row with no episode to
    learn from.
    """
    cfg = ctx.cfg
    set_threads(cfg.learner_settings.threads)
    start = ctx.head or ctx.checkpoint
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    checkpoint = load_checkpoint(ctx.store, start)
    algorithm, plan = with_limit(cfg, checkpoint), plan_learner(ctx, start, checkpoint)
    stream, num_done = train_stream(cfg, splits, start.state), int(start.state["global_step"])
    steps, num_skipped = range(num_done + 1, stage.last_step + 1), 0
    ctx.progress.start(f"stage {stage.index} · max_turns {stage.max_turns}", stage.num_steps)
    ctx.progress.advance(stage.num_steps - len(steps))
    with (
        ctx.environment(False) as endpoints,
        Ahead[Rollouts](cfg.rollout.max_staleness) as ahead,
        open_compute(cfg, plan, checkpoint, endpoints, version=num_done) as (learner, engine),
    ):
        ahead.begin(map(Rollouts, steps), generation(cfg, engine, stream, horizon_state(start)))
        observer = Observer(cfg, learner, engine)
        for step in steps:
            # generate
            rollouts = observer.wait(ahead)
            staleness = rollouts.staleness(most=cfg.rollout.max_staleness)
            if step == stage.first_step:
                require_success(ctx, rollouts.trajectories)

            # prepare experience
            num_skipped = 0 if rollouts.learned else num_skipped + 1
            if num_skipped > MAX_SKIPPED:
                raise nothing_to_learn(algorithm, step, num_skipped, rollouts.trajectories)
            update = None
            if rollouts.learned:
                # stale weights differ without an engine fault, so only a configured limit applies
                limited = resolved(cfg) if staleness else algorithm
                batch = batch_of(cfg, algorithm, rollouts.learned, step)
                prepared = learner.prepare(batch, limited, step=step)
                experience = with_advantages(prepared, algorithm)

                # train
                update = learner.update(experience, limited, step=step, seed=cfg.seed)
            observer.clock.lap("update")
            observer.published(engine.publish(learner, step))
            ahead.admit()
            is_due = cfg.validation.every and step % cfg.validation.every == 0
            validation = play_validation(cfg, engine, splits.validation, step) if is_due else []
            point, records = observer.step(rollouts, update, validation)
            manifest = ctx.step_taken(
                step,
                done=step == stage.last_step,
                state=state_after(cfg, rollouts, ahead.begun),
                files={**checkpoint.files(), **plan.files()},
                snapshot=learner.snapshot,
                points=[point],
                trajectories=records,
            )
            note = f"success {success_share(rollouts.trajectories):.2f}"
            logger.info("step %d: %s in %.1f s", step, note, point.metrics["time/step_s"])
            ctx.progress.advance(1, note)
    assert manifest is not None  # of the last step
    return manifest


def batch_of(
    cfg: RunConfig, algorithm: PolicyGradientConfig, episodes: Sequence[Trajectory], step: int
) -> Batch:
    """Return the episodes as a batch, with the recipe's penalties, turn rewards or shuffling."""

    def penalty(trajectory: Trajectory) -> float:
        if not isinstance(algorithm, DynamicSamplingConfig):
            return 0.0
        return overlong_penalty(
            trajectory,
            context_tokens=cfg.model.context_tokens,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )

    by_turn = isinstance(algorithm, DiscountedConfig) and algorithm.turn_rewards
    batch = to_batch(episodes, penalty=penalty, turn_rewards=by_turn)
    if algorithm.shuffle_rewards:
        batch = batch.with_shuffled_outcomes(seed=cfg.seed, step=step)
    return batch


def nothing_to_learn(
    algorithm: PolicyGradientConfig, step: int, skipped: int, trajectories: Sequence[Trajectory]
) -> RuntimeError:
    return RuntimeError(
        f"step {step}: no episode to learn from in {skipped} optimizer steps in a row"
        f" (recipe {algorithm.recipe}, truncated {algorithm.truncated}, success"
        f" {success_share(trajectories):.2f}); every group had equal rewards or"
        " was cut. Use easier or harder items, a longer horizon, or another recipe"
    )


def require_success(ctx: StepContext, trajectories: Sequence[Trajectory]) -> None:
    """Raise AlarmStop, or only warn if so configured, if a stage has nothing to learn from.

    That is so if all groups of the first rollouts have equal rewards without a success, and a
    stored evaluation of the same weights has none either, in MIN_HOPELESS episodes or more.
    trajectories: the first rollouts.
    """
    action, start = ctx.cfg.alarms.no_success, ctx.checkpoint
    first = rollout_metrics(trajectories)
    equal = first.get("rollout/equal_reward_groups_frac", 0.0)
    if action == "off" or equal < 1 or first["rollout/success"]:
        return
    judged = [
        head
        for head in ctx.store.heads()
        if head.step == f"evaluate-{start.step}"
        and head.done
        and head.parents.get(start.step) == start.digest
    ]
    if any(share["mean"] for head in judged for share in head.results["summary"].values()):
        return
    evaluations = [head.config["evaluation"] for head in judged]
    played = max(
        (evaluation["num_items"] * (evaluation["num_samples"] + 1) for evaluation in evaluations),
        default=0,
    )
    tried = int(first["rollout/num_episodes"])
    if not played or played + tried < MIN_HOPELESS:
        return
    message = (
        f"stage {ctx.step.name} cannot learn: none of the {tried} episodes of its first optimizer"
        f" step and none of the {played} of the evaluation of {start.step} succeeded, and all"
        " groups have equal rewards; raise warm_start.num_demos and warm_start.steps, set"
        " rollout.instructions true, or choose easier items or a longer horizon"
        " (alarms.no_success warn continues)"
    )
    if action == "stop":
        raise AlarmStop(message)
    logger.warning("%s", message)


def plan_learner(ctx: StepReader, start: Manifest, checkpoint: Checkpoint) -> LearnerPlan:
    """Return the plan of the learner as `start` left it, with the recipe's critic and reference.

    Errors: ConfigError if `start` was trained without the critic that the recipe needs.
    """
    cfg, algorithm = ctx.cfg, resolved(ctx.cfg)
    # only after an earlier stage: the warm start has another optimizer
    continues = "stream_position" in start.state
    critic = reference = critic_lr = None
    has_critic = isinstance(algorithm, ActorCriticConfig)
    if isinstance(algorithm, ActorCriticConfig):
        critic_lr = algorithm.critic_lr
        critic = ctx.tensors_of(start, CRITIC).get(CRITIC)
        if continues and critic is None:
            raise ConfigError(
                f"recipe {algorithm.recipe} needs a critic, and {start.step} commit {start.seq}"
                f" has no {CRITIC}: it was trained without one; train that stage with this recipe"
                " too, or use a recipe without a critic"
            )
    if algorithm.kl_coef:
        reference = ctx.policy(ctx.start)
    return LearnerPlan(
        architecture=checkpoint.architecture,
        weights=ctx.policy(start),
        adapter=ctx.adapter(start),
        optimizer=cfg.optimizer,
        settings=cfg.learner_settings,
        total_steps=sum(cfg.horizon.stage_steps),
        has_critic=has_critic,
        critic=critic,
        critic_lr=critic_lr,
        reference=reference,
        optimizer_states=(ctx.tensors_of(start, OPTIMIZER, CRITIC_OPTIMIZER) if continues else {}),
    )


def with_limit(cfg: RunConfig, checkpoint: Checkpoint) -> PolicyGradientConfig:
    """Return `resolved` with `max_mismatch_kl`, from the engine's tolerance if it is None.
    Errors: ConfigError if the engine has no known tolerance.
    """
    algorithm = resolved(cfg)
    if algorithm.max_mismatch_kl is not None:
        return algorithm
    limit = tolerance_of(cfg, checkpoint.dtype).mismatch_kl
    return algorithm.model_copy(update={"max_mismatch_kl": limit})
