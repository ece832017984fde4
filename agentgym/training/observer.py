"""Numbers about training: metrics and times of a step, and the record of each episode."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentgym.algorithms.batch import Experience
from agentgym.compute.placement import Engine, Learner, num_accelerators
from agentgym.config import RunConfig
from agentgym.rollouts.collect import rollout_metrics, validation_metrics
from agentgym.steps.context import now_ms
from agentgym.tracking.points import Point
from agentgym.training.ahead import Ahead, Rollouts
from agentgym.types import EngineUsage, Learned, Trajectory

BYTES_PER_TOKEN = 32  # for four numbers as text, before compression
LEAST_RATIO = 5e-5  # ratios below this are recorded as 0


def with_reasons(
    cfg: RunConfig,
    trajectories: Sequence[Trajectory],
    reasons: Sequence[str],
    experience: Experience | None,
    learner: Learner,
    step: int,
) -> list[Trajectory]:
    """Return all episodes of a step for storage.

    Episodes that were left out get the reason; a share of the others gets the update's numbers of
    each token.
    reasons: by episode, empty if it is learned from; experience: of the episodes learned from, in
    their order, or None if there are none.
    """
    notes = {index: Learned(excluded=reason) for index, reason in enumerate(reasons) if reason}
    if experience is not None:
        kept = [index for index, reason in enumerate(reasons) if not reason]
        drawn = shown(cfg, [sum(trajectories[index].action_mask) for index in kept], step)
        for index, numbers in zip(drawn, learned_of(experience, learner, drawn), strict=True):
            notes[kept[index]] = numbers
    return [
        replace(episode, learned=notes.get(index)) for index, episode in enumerate(trajectories)
    ]


def update_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Return `actor/update_kl`: how far the update moved the policy, from recorded ratios.

    The value is the mean over action tokens of the k3 estimate, ratio - 1 - log ratio, in nats; it
    is never negative. Empty without recorded ratios.
    """
    by_episode = [record.learned.ratios for record in records if record.learned is not None]
    ratios = [max(ratio, LEAST_RATIO) for of_episode in by_episode for ratio in of_episode]
    if not ratios:
        return {}
    moved = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    return {"actor/update_kl": moved / len(ratios)}


def shown(cfg: RunConfig, num_tokens: Sequence[int], step: int) -> list[int]:
    """Draw the episodes whose token numbers are recorded: a share rollout.token_numbers_frac, or
    fewer. An episode that does not fit into the rest of rollout.token_numbers_kib is skipped.
    num_tokens: action tokens by episode. Result: ascending indices.
    """
    settings, count = cfg.rollout, len(num_tokens)
    bytes_left = 1024 * settings.token_numbers_kib
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, step + 4_000_000]))
    num_wanted, drawn = math.ceil(settings.token_numbers_frac * count), list[int]()
    for index in order.permutation(count).tolist():
        needed = num_tokens[index] * BYTES_PER_TOKEN
        if len(drawn) < num_wanted and needed <= bytes_left:
            bytes_left -= needed
            drawn.append(index)
    return sorted(drawn)


def learned_of(experience: Experience, learner: Learner, sequences: Sequence[int]) -> list[Learned]:
    """Return the numbers of each action token of these sequences (indices in the batch). For the
    ratios, the updated learner scores them again.
    """
    if not sequences:
        return []
    assert experience.advantages is not None
    assert experience.logprobs is not None
    assert experience.entropies is not None
    numbers = (experience.logprobs, experience.entropies, experience.advantages)
    part = experience.batch.select(torch.tensor(sequences))
    now = learner.score(part)[part.action_mask.cpu()]
    of_token, of_part = experience.sequence.cpu(), part.sequence[part.action_mask].cpu()
    result = []
    for index, sequence in enumerate(sequences):
        is_own = of_token == sequence
        before, entropy, gain = (tensor.cpu()[is_own] for tensor in numbers)
        ratio = (now[of_part == index] - before).exp()
        result.append(
            Learned(
                logprobs=_rounded(before),
                advantages=_rounded(gain),
                ratios=_rounded(ratio),
                entropies=_rounded(entropy),
            )
        )
    return result


def _rounded(numbers: Tensor) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in numbers.tolist())


class Observer:
    """The numbers about each optimizer step of a stage: metrics, times, records of its episodes."""

    def __init__(self, cfg: RunConfig, learner: Learner, engine: Engine) -> None:
        self._cfg, self._learner, self._engine = cfg, learner, engine
        self.clock = clock_of(cfg, learner)

    def wait(self, ahead: Ahead[Rollouts]) -> Rollouts:
        """Begin a step: return its rollouts once they are generated. Errors: of `Ahead.take`."""
        self.clock.lap("commit")  # of the previous step
        self._cpu_began, usage = time.process_time(), self._engine.usage()
        rollouts = ahead.take()
        self.clock.lap_rollouts(rollouts.after - usage)
        self.clock.lap("other")
        return rollouts

    def published(self, canary: float) -> None:
        """Note the end of a publish. canary: difference of engine and learner after it, nats."""
        self.clock.lap("publish")
        # CPU time of this process, without servers and validation
        self._publish = {
            "sync/canary_rms": canary,
            "time/cpu_s": time.process_time() - self._cpu_began,
        }

    def step(
        self,
        rollouts: Rollouts,
        update: tuple[Experience, dict[str, float]] | None,
        validation: Sequence[Trajectory],
    ) -> tuple[Point, list[Trajectory]]:
        """End a step: return its metrics, and its episodes for storage.

        update: result of `Learner.update`, None if nothing was learned.
        validation: episodes that were played after the publish.
        Errors: RuntimeError if an episode was sampled with weights older than configured.
        """
        self.clock.lap("validate")
        experience, updated = update or (None, {})
        staleness = rollouts.staleness(most=self._cfg.rollout.max_staleness)
        records = with_reasons(
            self._cfg,
            rollouts.trajectories,
            rollouts.reasons,
            experience,
            self._learner,
            rollouts.step,
        )
        metrics = {
            **rollout_metrics(rollouts.trajectories),
            "sync/staleness_max": float(staleness),
            "actor/skipped_updates": float(experience is None),
            **(experience.metrics if experience else {}),
            **updated,
            **self._publish,
            **(validation_metrics(validation) if validation else {}),
            **rollout_speed(
                rollouts.trajectories, rollouts.seconds, rollouts.after - rollouts.before
            ),
            **update_metrics(records),
        }
        metrics |= self.clock.step(experience.batch.num_tokens if experience else 0, metrics)
        return Point(rollouts.step, now_ms(), metrics), [*records, *validation]


class StepClock:
    """A clock that splits a loop's time into optimizer steps, and a step into disjoint parts."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        peak_tflops: float | None = None,
        accelerators: float | None = None,
    ) -> None:
        """Start the clock.

        peak_tflops: sum over all devices that update; None: unknown.
        accelerators: number of devices that the run occupies in training; None: not logged.
        """
        self._peak_tflops, self._accelerators = peak_tflops, accelerators
        self._clock, self._since = clock, clock()
        self._parts = defaultdict[str, float](float)

    def lap(self, part: str) -> None:
        """Assign the time since the last lap to this part of the step."""
        self._parts[part] += self._passed()

    def lap_rollouts(self, usage: EngineUsage) -> None:
        """Assign the time since the last lap, in which the loop waited for rollouts.

        `generate` is the time in which the engine had a sequence in work, `wait` the time in which
        all episodes waited for their environments. usage: of the engine, since the last lap.
        """
        passed = self._passed()
        generating = passed * usage.busy_frac
        self._parts["generate"] += generating
        self._parts["wait"] += passed - generating

    def step(self, num_trained: int, update: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the step that ends here, and begin the next one.

        num_trained: tokens in the update, each counted once however often it was used.
        update: the update's metrics; empty if nothing was learned.
        """
        self.lap("other")
        parts, self._parts = self._parts, defaultdict(float)
        total = sum(parts.values())
        metrics = {f"time/{part}_s": seconds for part, seconds in parts.items()}
        metrics["time/step_s"] = total
        metrics["perf/trained_tokens_per_s"] = _share(num_trained, parts.get("update", 0.0))
        if self._peak_tflops is not None:
            tflop = update.get("perf/update_tflop", 0.0)
            metrics["perf/mfu"] = _share(tflop / self._peak_tflops, parts.get("update", 0.0))
        if self._accelerators is not None:
            metrics["perf/accelerators"] = self._accelerators
        if "wait" in parts:
            waited = parts["generate"] + parts["wait"]
            metrics["perf/learner_idle_frac"] = _share(waited, total)
        return metrics

    def _passed(self) -> float:
        before, self._since = self._since, self._clock()
        return self._since - before


def clock_of(cfg: RunConfig, learner: Learner) -> StepClock:
    """Return the clock of a loop that trains this learner."""
    return StepClock(
        peak_tflops=learner.peak_tflops(cfg.compute_peak_tflops), accelerators=num_accelerators(cfg)
    )


def rollout_speed(
    trajectories: Sequence[Trajectory], seconds: float, usage: EngineUsage
) -> dict[str, float]:
    """Return speed metrics of rollouts; without reported usage only time and sampled tokens/s."""
    num_sampled = sum(sum(trajectory.action_mask) for trajectory in trajectories)
    metrics = {
        "time/rollouts_s": seconds,
        "perf/generated_tokens_per_s": _share(num_sampled, seconds),
    }
    if usage.total_s > 0:
        metrics |= {
            "perf/prompt_tokens_per_s": _share(usage.prompt_tokens, seconds),
            "perf/prefix_cache_hit_frac": _share(usage.cached_tokens, usage.prompt_tokens),
            "perf/engine_idle_frac": 1.0 - usage.busy_frac,
            "perf/queue_depth_mean": usage.mean_depth,
            "perf/queue_depth_max": float(max(usage.depth_s, default=0)),
        }
    return metrics


def _share(part: float, whole: float) -> float:
    """Return part / whole, or 0 if the whole is 0."""
    return part / whole if whole > 0 else 0.0
