"""Speed of a training step by parts. No result depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from agentgym.compute.placement import Learner, num_accelerators
from agentgym.config import RunConfig
from agentgym.types import EngineUsage, Trajectory


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
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Assign the time since the last lap to this part of the step."""
        self._add(part, self._passed())

    def lap_rollouts(self, usage: EngineUsage) -> None:
        """Assign the time since the last lap, in which the loop waited for rollouts.

        `generate` is the time in which the engine had a sequence in work, `wait` the time in which
        all episodes waited for their environments. usage: of the engine, since the last lap.
        """
        passed = self._passed()
        generating = passed * usage.busy_frac
        self._add("generate", generating)
        self._add("wait", passed - generating)

    def step(self, num_trained: int, update: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the step that ends here, and begin the next one.

        num_trained: tokens in the update, each counted once however often it was used.
        update: the update's metrics; empty if nothing was learned.
        """
        self.lap("other")
        parts, self._parts = self._parts, {}
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

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds


def clock_of(cfg: RunConfig, learner: Learner) -> StepClock:
    """Return the clock of a loop that trains this learner."""
    return StepClock(
        peak_tflops=learner.peak_tflops(cfg.compute_peak_tflops),
        accelerators=num_accelerators(cfg),
    )


def rollout_speed(
    trajectories: Sequence[Trajectory], seconds: float, usage: EngineUsage
) -> dict[str, float]:
    """Return the speed metrics of rollouts that took `seconds` and this engine usage.

    If the engine reports no usage, only the rate of sampled tokens is known.
    """
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
