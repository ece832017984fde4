"""What a simulator must offer to be served, and what an expert for it must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.dialect import Dialect
from envs.wire import Example


@dataclass(frozen=True, slots=True)
class StepResult:
    """One simulator step; the fields mean what `envs.wire.StepReply` says."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool = False
    success: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Expert(Protocol):
    """Knows the simulator it was made for and says what to do next."""

    def next_action(self) -> str:
        """Errors: `ExpertFailed` where the expert has no answer in time."""
        ...


class ExpertFailed(RuntimeError):
    """The expert has no action for this state."""


class GraderFailed(RuntimeError):
    """The episode ended and there is no verdict: a judge or a site it asks did not answer."""


class UnknownTask(ValueError):
    """The environment has no task of this id."""


class Simulator(Protocol):
    """One session's world. One thread at a time uses it."""

    def reset(self, task_id: int) -> str:
        """Build the task and return its first observation.
        Equal ids give equal episodes on every machine.

        Errors: UnknownTask.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Text the simulator cannot read is an observation that says so, never an exception."""
        ...

    def render(self) -> tuple[str, bytes]:
        """(media type, bytes) of the present state: a picture, text, or JSON for the viewer to
        draw.
        """
        ...

    def expert(self) -> Expert: ...

    def close(self) -> None: ...


class Awaited(Protocol):
    """A simulator in another process: its steps are awaited on the event loop.
    They have a deadline of their own.
    """

    async def step_async(self, action: str) -> StepResult:
        """As `Simulator.step`."""
        ...


class Hinting(Protocol):
    """A simulator that can say which actions it would carry out now, all or the likely ones;
    `GET /hints` shows them, observations never do.
    """

    def hints(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """An environment that can be served under its name."""

    name: str
    instructions: str  # the instructions a language model gets
    make: Callable[[], Simulator]
    options: dict[str, Any]
    # a scripted episode on task `probe_task`, played before the server says it is ready
    probe_actions: tuple[str, ...]
    # true where a step may take more than a millisecond: it then runs off the event loop
    blocking: bool = False
    awaited: bool = False  # its simulators are `Awaited`
    offers_hints: bool = False  # its simulators are `Hinting`
    probe_task: int = 0  # the task of that episode, where there is no 0
    # as AgentGym's own server speaks of it (None: as most of them do); and as that server shows it,
    # where that differs from this
    dialect: Dialect | None = None
    agentgym: EnvSpec | None = None
    # Prometheus name: (help, present value)
    gauges: Mapping[str, tuple[str, Callable[[], float]]] = field(default_factory=dict)
    # done off the event loop before that episode: what the first sessions would wait for. It gets
    # the most that may be open
    warm: Callable[[int], None] | None = None
    # end what the simulators share, once the last session is closed
    close: Callable[[], None] | None = None
    # worked examples for a language model, the simplest first; made when a server is first asked
    examples: Callable[[], tuple[Example, ...]] = tuple
    # what the task of an id is, whatever its number: equal texts, the same task. None where the
    # environment cannot say. Errors: UnknownTask
    identity: Callable[[int], str] | None = None
