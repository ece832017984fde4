"""Generation of rollouts in order, a limited number ahead of the updates that learn from them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from agentgym.algorithms.batch import why_not
from agentgym.algorithms.recipe import recipe_of
from agentgym.compute.placement import Engine
from agentgym.config import DynamicSamplingConfig, PolicyGradientConfig, RunConfig, max_refills
from agentgym.data.items import ItemStream
from agentgym.rollouts.collect import success_share
from agentgym.rollouts.engine import RolloutRequest
from agentgym.steps.step import HorizonState, advance, max_turns
from agentgym.store.manifest import Manifest
from agentgym.types import EngineUsage, Item, Trajectory

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class Ahead(Generic[T]):
    """A filler of batches, one after another, in a thread that ends with this context.

    Batch b = 0, 1, ... is started after at least b - `max_ahead` calls of `admit`: at most
    `max_ahead` updates lie between its first turn and the update that learns from it.
    With `max_ahead` 0 there is no thread: `take` fills the batch itself.
    """

    def __init__(self, max_ahead: int) -> None:
        self._most = max_ahead
        self._admitted = threading.Semaphore(max_ahead + 1)
        self._begun: deque[T] = deque()
        self._filled: SimpleQueue[T | BaseException] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._made: Iterator[T] = iter(())

    def begin(self, batches: Iterable[T], fill: Callable[[T], None]) -> None:
        """Start to fill batches.

        batches: empty batches, in order; fill: must have deadlines, because `take` has none.
        """
        self._made = self._filling(batches, fill)
        if self._most:
            self._thread = threading.Thread(target=self._serve, name="ahead", daemon=True)
            self._thread.start()

    def take(self) -> T:
        """Wait for the next batch and return it; there must be one. Errors: the error of its
        filling; no later batch was started.
        """
        if self._thread is None:
            batch = next(self._made)
        else:
            filled = self._filled.get()
            if isinstance(filled, BaseException):
                raise filled
            batch = filled
        self._begun.popleft()
        return batch

    def admit(self) -> None:
        """Let one more batch start; call it once the engine has the weights of an update."""
        self._admitted.release()

    @property
    def begun(self) -> list[T]:
        """Batches started and not yet consumed, oldest first; the last may be incomplete."""
        return list(self._begun)

    def _filling(self, batches: Iterable[T], fill: Callable[[T], None]) -> Iterator[T]:
        for batch in batches:
            self._admitted.acquire()  # returns after `admit` or `__exit__`
            if self._ended.is_set():
                return
            self._begun.append(batch)
            fill(batch)
            yield batch

    def _serve(self) -> None:
        try:
            for batch in self._made:
                self._filled.put(batch)
        except BaseException as error:  # `take` raises it
            self._filled.put(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._admitted.release()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("generation ahead did not end within %g s", CLOSE_TIMEOUT_S)


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
        pairs = zip(self.trajectories, self.reasons, strict=True)
        return [trajectory for trajectory, reason in pairs if not reason]

    def staleness(self, *, most: int) -> int:
        """Return the lag, in updates, of the oldest weights that sampled an episode; 0 without any.
        Errors: RuntimeError above `most`.
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

    horizon: its state before the first of them. Each step's items follow those of the step before,
    and its horizon follows from the success of all earlier steps, learned from or not. So neither
    depends on how far ahead a step is generated.
    """

    def fill(rollouts: Rollouts) -> None:
        nonlocal horizon
        rollouts.max_turns = max_turns(cfg.horizon, rollouts.step, horizon)
        generate(cfg, engine, stream, rollouts)
        horizon = advance(cfg.horizon, horizon, success_share(rollouts.trajectories))
        rollouts.horizon = horizon

    return fill


def generate(cfg: RunConfig, engine: Engine, stream: ItemStream, rollouts: Rollouts) -> None:
    """Fill `rollouts` with `items_per_step` groups. Dynamic sampling adds a group for each one that
    has no episode to learn from, in at most `max_refills` rounds.
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
        teaching = {trajectory.item for trajectory in rollouts.learned}
        missing = settings.items_per_step - len(teaching)
        if missing <= 0:
            break
    rollouts.position = stream.position
    rollouts.seconds = time.perf_counter() - began
    rollouts.after = engine.usage()


def resolved(cfg: RunConfig) -> PolicyGradientConfig:
    """Return the algorithm's settings, with the recipe's values in place of None."""
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
    """Return True if a truncated episode's tokens end with its last observation, for the critic."""
    is_rl = isinstance(cfg.algorithm, PolicyGradientConfig)
    return is_rl and resolved(cfg).truncated == "bootstrap"


def horizon_state(manifest: Manifest) -> HorizonState:
    """Return the horizon's state in a commit; the initial one if it has none."""
    recorded = manifest.state.get("horizon", {})
    return HorizonState(int(recorded.get("level", 0)), tuple(recorded.get("recent", ())))
