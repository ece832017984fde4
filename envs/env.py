"""The interfaces of a simulator that can be served, and of an expert for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.dialect import Dialect
from envs.wire import Example


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one simulator step; for the fields see `envs.wire.StepReply`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool = False
    success: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Expert(Protocol):
    """A player that knows its simulator's state and proposes the next action."""

    def next_action(self) -> str:
        """Return the next action. Errors: ExpertFailed if the expert has none for this state.

        It may take any time: the caller limits it.
        """


class ExpertFailed(RuntimeError):
    """The expert has no action for this state; the text gives the reason."""


class GraderFailed(RuntimeError):
    """The episode ended without a verdict: a judge or a site it depends on did not answer."""


class UnknownTask(ValueError):
    """The environment has no task of this id."""


class Simulator(Protocol):
    """The world of one session, used by one thread at a time."""

    def reset(self, task_id: int) -> str:
        """Build the task and return its first observation.
        Equal ids give equal tasks on every machine.

        Errors: UnknownTask.
        """

    def step(self, action: str) -> StepResult:
        """Take an action. An action that cannot be parsed gives an error text as observation,
        never an exception. Errors: GraderFailed if a judge or site that gives the verdict fails.
        """

    def render(self) -> tuple[str, bytes]:
        """Return (media type, bytes) of the current state: a picture, text, or JSON that the
        viewer draws.
        """

    def expert(self) -> Expert: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """An environment that can be served under its name."""

    name: str
    instructions: str  # the instructions a language model gets
    make: Callable[[], Simulator]
    options: dict[str, Any]
    # a scripted episode on task `probe_task`, played before the server reports ready
    probe_actions: tuple[str, ...]
    # true if a step may take more than a millisecond: it then runs off the event loop
    blocking: bool = False
    # true if its simulators, in another process, have `async step_async(action) -> StepResult`: it
    # is awaited on the event loop, has its own deadline and does what `step` does
    awaited: bool = False
    # true if its simulators have `hints() -> list[str]`, possible actions for `GET /hints`
    offers_hints: bool = False
    probe_task: int = 0  # the task of that episode; set it if there is no task 0
    # replies of AgentGym's own server (None: those that most of its servers share), and the
    # environment behind these routes if it differs from this one
    dialect: Dialect | None = None
    agentgym: EnvSpec | None = None
    # Prometheus name: (help, current value)
    gauges: Mapping[str, tuple[str, Callable[[], float]]] = field(default_factory=dict)
    # called with max_sessions off the event loop before that episode: does the slow setup that the
    # first sessions would otherwise wait for
    warm: Callable[[int], None] | None = None
    # closes resources that the simulators share, once the last session is closed
    close: Callable[[], None] | None = None
    # worked examples for a language model, the simplest first; made at a server's first /info
    examples: Callable[[], tuple[Example, ...]] = tuple
    # task id -> text that identifies the task: equal texts, same task. None if the environment
    # does not identify its tasks. Errors: UnknownTask
    identity: Callable[[int], str] | None = None
