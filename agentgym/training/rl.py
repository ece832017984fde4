"""Multi-turn reinforcement learning: generate, prepare experience, train; one stage of the
curriculum at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch, overlong_penalty, to_batch, why_not
from agentgym.algorithms.recipe import recipe_of
from agentgym.compute.placement import Engine, open_compute, play_validation
from agentgym.config import (
    ActorCriticConfig,
    ConfigError,
    DiscountedConfig,
    DynamicSamplingConfig,
    PolicyGradientConfig,
    RunConfig,
    max_refills,
)
from agentgym.data.items import ItemStream, splits_from_json, train_stream
from agentgym.learner.plan import LearnerPlan
from agentgym.models.checkpoint import (
    CRITIC,
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    Checkpoint,
    load_checkpoint,
)
from agentgym.models.model import set_threads
from agentgym.rollouts.collect import rollout_metrics, success_share, validation_metrics
from agentgym.rollouts.engine import RolloutRequest
from agentgym.rollouts.policies.engines import tolerance_of
from agentgym.steps.context import StepContext, StepReader, now_ms
from agentgym.steps.step import HorizonState, Stage, advance, max_turns
from agentgym.store.manifest import Manifest
from agentgym.tracking.alarms import AlarmStop
from agentgym.tracking.points import Point
from agentgym.training.ahead import Ahead
from agentgym.training.learned import update_metrics, with_reasons
from agentgym.training.speed import clock_of, rollout_speed
from agentgym.types import EngineUsage, Item, Trajectory

logger = logging.getLogger(__name__)

# Number of episodes without a success after which a policy counts as hopeless: with 95 % confidence
# its success rate is below 2 %
MIN_HOPELESS = 150
MAX_SKIPPED = 10  # optimizer steps in a row without an episode to learn from


def train_stage(ctx: StepContext, stage: Stage) -> Manifest:
    """Train to the stage's end, from its last commit or the parent's; return the final commit."""
    set_threads(ctx.cfg.learner_settings.threads)
    cfg = ctx.cfg
    start = ctx.head or ctx.checkpoint
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    checkpoint = load_checkpoint(ctx.store, start)
    algorithm, plan = with_limit(cfg, checkpoint), plan_learner(ctx, start, checkpoint)
    step, skipped = int(start.state["global_step"]), 0
    stream = train_stream(cfg, splits, start.state)
    ctx.progress.start(
        f"stage {stage.index} · max_turns {stage.max_turns}", stage.last_step - stage.first_step + 1
    )
    ctx.progress.advance(step + 1 - stage.first_step)

    with (
        ctx.environment(False) as endpoints,
        Ahead[Rollouts](cfg.rollout.max_staleness) as ahead,
        open_compute(cfg, plan, checkpoint, endpoints, version=step) as (learner, engine),
    ):
        ahead.begin(
            (Rollouts(later) for later in range(step + 1, stage.last_step + 1)),
            generation(cfg, engine, stream, horizon_state(start)),
        )
        clock = clock_of(cfg, learner)
        while step < stage.last_step:
            step += 1
            clock.lap("commit")  # of the previous step
            cpu_began, usage = time.process_time(), engine.usage()

            # generate
            rollouts = ahead.take()
            clock.lap_rollouts(rollouts.after - usage)
            staleness = rollouts.staleness(most=cfg.rollout.max_staleness)
            metrics = rollout_metrics(rollouts.trajectories)
            if step == stage.first_step:
                require_success(ctx, metrics)
            metrics["sync/staleness_max"] = float(staleness)

            # prepare experience
            clock.lap("other")
            episodes = rollouts.learned
            skipped = 0 if episodes else skipped + 1
            if skipped > MAX_SKIPPED:
                raise nothing_to_learn(algorithm, step, skipped, rollouts.trajectories)
            metrics["actor/skipped_updates"] = float(not episodes)
            experience = None
            if episodes:
                batch = batch_of(cfg, algorithm, episodes, step)
                # old weights may differ without an engine fault; the canary checks the present ones
                limited = resolved(cfg) if staleness else algorithm
                prepared = learner.prepare(batch, limited, step=step)
                experience = with_advantages(prepared, algorithm)

            # train
            if experience is not None:
                experience, of_update = learner.update(
                    experience, limited, step=step, seed=cfg.seed
                )
                metrics |= experience.metrics | of_update
            clock.lap("update")
            metrics["sync/canary_rms"] = engine.publish(learner, step)
            ahead.admit()
            clock.lap("publish")
            # CPU time of this process, without servers and validation
            metrics["time/cpu_s"] = time.process_time() - cpu_began

            validation = []
            if cfg.validation.every and step % cfg.validation.every == 0:
                validation = play_validation(cfg, engine, splits.validation, step)
                metrics |= validation_metrics(validation)
            clock.lap("validate")
            records = with_reasons(
                cfg, rollouts.trajectories, rollouts.reasons, experience, learner, step
            )
            metrics |= rollouts.speed | update_metrics(records)
            metrics |= clock.step(experience.batch.num_tokens if experience else 0, metrics)
            manifest = ctx.step_taken(
                step,
                done=step == stage.last_step,
                state=state_after(cfg, rollouts, ahead.begun),
                files={**checkpoint.files(), **plan.files()},
                snapshot=learner.snapshot,
                points=[Point(step, now_ms(), metrics)],
                trajectories=[*records, *validation],
            )
            success = success_share(rollouts.trajectories)
            logger.info("step %d: success %.2f in %.1f s", step, success, metrics["time/step_s"])
            ctx.progress.advance(1, f"success {success:.2f}")
    assert manifest is not None  # of the last step
    return manifest


@dataclass
class Rollouts:
    """The episodes of one optimizer step, filled in as they are generated."""

    step: int
    max_turns: int = 0
    items: list[Item] = field(default_factory=list)  # taken from the stream, in order
    # of all items, in admission order
    trajectories: list[Trajectory] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why left out; empty: learned from
    position: int = 0  # of the stream after these items
    horizon: HorizonState = field(default_factory=HorizonState)  # after these episodes
    seconds: float = 0.0
    before: EngineUsage = field(default_factory=EngineUsage)
    after: EngineUsage = field(default_factory=EngineUsage)

    @property
    def learned(self) -> list[Trajectory]:
        """The trajectories that are learned from, in order."""
        return [
            trajectory
            for trajectory, reason in zip(self.trajectories, self.reasons, strict=True)
            if not reason
        ]

    @property
    def speed(self) -> dict[str, float]:
        return rollout_speed(self.trajectories, self.seconds, self.after - self.before)

    def staleness(self, *, most: int) -> int:
        """Return the number of updates by which the oldest sampling weights lag behind.

        Errors: RuntimeError if it exceeds `most`.
        """
        played = [trajectory for trajectory in self.trajectories if trajectory.versions]
        if not played:
            return 0
        oldest = min(played, key=lambda trajectory: trajectory.versions)
        lag = self.step - 1 - oldest.versions[0]
        if lag > most:
            raise RuntimeError(
                f"step {self.step}: {oldest.item.item_id} sample {oldest.sample} was sampled by"
                f" weights version {oldest.versions[0]}, {lag} updates behind (limit"
                f" rollout.max_staleness {most}); the engine kept old weights after new ones were"
                " published: run again, twice is a bug of the engine"
            )
        return lag


def state_after(cfg: RunConfig, rollouts: Rollouts, waiting: Sequence[Rollouts]) -> dict[str, Any]:
    """Return the state from which a run continues after learning from these rollouts.

    waiting: rollouts generated or started for later steps. A resumed run generates them again, from
    the same items and with the same rule of the horizon.
    """
    state = {
        "global_step": rollouts.step,
        "stream_position": rollouts.position,
        "consumed": [item.item_id for item in rollouts.items],
        "max_turns": rollouts.max_turns,
        "horizon": asdict(rollouts.horizon),
    }
    if cfg.rollout.max_staleness:
        state["ahead"] = [
            {
                "global_step": later.step,
                "items": [item.item_id for item in later.items],
                "versions": sorted({turn for t in later.trajectories for turn in t.versions}),
            }
            for later in waiting
        ]
    return state


def generation(
    cfg: RunConfig, engine: Engine, stream: ItemStream, horizon: HorizonState
) -> Callable[[Rollouts], None]:
    """Return the function that fills the rollouts of one optimizer step after another.

    horizon: before the first of them. Each step's items begin where the step before left the
    stream, and its horizon follows from the success of all earlier steps, learned from or not. So
    neither depends on how far ahead a step is generated.
    """

    def fill(rollouts: Rollouts) -> None:
        nonlocal horizon
        rollouts.max_turns = max_turns(cfg.horizon, rollouts.step, horizon)
        generate(cfg, engine, stream, rollouts)
        horizon = advance(cfg.horizon, horizon, success_share(rollouts.trajectories))
        rollouts.horizon = horizon

    return fill


def generate(cfg: RunConfig, engine: Engine, stream: ItemStream, rollouts: Rollouts) -> None:
    """Collect `items_per_step` groups of episodes into `rollouts`.

    With dynamic sampling, as many are added as lack a signal, as often as the recipe allows.
    """
    rollouts.before, began = engine.usage(), time.perf_counter()
    settings, algorithm = cfg.rollout, resolved(cfg)
    truncated, signal = algorithm.truncated or "zero", isinstance(algorithm, DynamicSamplingConfig)
    missing = settings.items_per_step
    for _ in range(1 + max_refills(algorithm)):
        new = stream.next(missing)
        rollouts.items += new
        request = RolloutRequest(
            new,
            num_samples=settings.group_size,
            step=rollouts.step,
            max_turns=rollouts.max_turns,
            temperature=settings.temperature,
            seed=cfg.seed,
            read_last=reads_last(cfg),
        )
        rollouts.trajectories += engine.collect(request)
        rollouts.reasons = why_not(rollouts.trajectories, truncated=truncated, signal=signal)
        teaching = {
            trajectory.item
            for trajectory, reason in zip(rollouts.trajectories, rollouts.reasons, strict=True)
            if not reason
        }
        missing = settings.items_per_step - len(teaching)
        if missing <= 0:
            break
    rollouts.position = stream.position
    rollouts.seconds = time.perf_counter() - began
    rollouts.after = engine.usage()


def batch_of(
    cfg: RunConfig, algorithm: PolicyGradientConfig, episodes: Sequence[Trajectory], step: int
) -> Batch:
    """Return the recipe's batch of episodes that may be learned from."""

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


def require_success(ctx: StepContext, first: Mapping[str, float]) -> None:
    """Raise AlarmStop, or only warn if so configured, if a stage has nothing to learn from.

    That is so if all groups of the first rollouts have equal rewards without a success, and a
    stored evaluation of the same weights has none either, in MIN_HOPELESS episodes or more.
    first: the metrics of the first rollouts.
    """
    action, start = ctx.cfg.alarms.no_success, ctx.checkpoint
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


def resolved(cfg: RunConfig) -> PolicyGradientConfig:
    """Return the algorithm's settings, with the recipe's own values for missing ones."""
    recipe, algorithm = recipe_of(cfg.algorithm.recipe), cfg.algorithm
    assert isinstance(algorithm, PolicyGradientConfig)
    longest = cfg.rollout.max_new_tokens * max(cfg.horizon.max_turns)
    defaults = {
        "truncated": recipe.truncated,
        "aggregation": recipe.aggregation,
        "constant_length": longest,
    }
    return algorithm.model_copy(
        update={name: value for name, value in defaults.items() if getattr(algorithm, name) is None}
    )


def reads_last(cfg: RunConfig) -> bool:
    """Return True if the tokens of a truncated episode end with its last observation.

    The critic's value of it then stands for the rewards to come.
    """
    is_rl = isinstance(cfg.algorithm, PolicyGradientConfig)
    return is_rl and resolved(cfg).truncated == "bootstrap"


def with_limit(cfg: RunConfig, checkpoint: Checkpoint) -> PolicyGradientConfig:
    """Return `resolved` with the limit of the distance between engine and learner.

    Errors: ConfigError if the engine has no limit for weights of this dtype.
    """
    algorithm = resolved(cfg)
    limit = algorithm.max_mismatch_kl
    if limit is None:
        limit = tolerance_of(cfg, checkpoint.dtype).mismatch_kl
    return algorithm.model_copy(update={"max_mismatch_kl": limit})


def horizon_state(manifest: Manifest) -> HorizonState:
    """Return the horizon's state in a commit; the initial one if it has none."""
    recorded = manifest.state.get("horizon", {})
    return HorizonState(int(recorded.get("level", 0)), tuple(recorded.get("recent", ())))
