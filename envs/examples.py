"""Worked examples: short plays by an expert that show a language model the form of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from envs.env import Expert, ExpertFailed, Simulator
from envs.wire import Example, ExampleTurn

_EXAMPLES = TypeAdapter(tuple[Example, ...])


class Script:
    """An expert that returns the given actions in order, then raises ExpertFailed."""

    def __init__(self, actions: Iterable[str]) -> None:
        self._left = iter(actions)

    def next_action(self) -> str:
        """Return the next action. Errors: ExpertFailed if none is left."""
        try:
            return next(self._left)
        except StopIteration:
            raise ExpertFailed("the script ended before the task did") from None


def played(
    simulator: Simulator,
    task_id: int,
    expert: Callable[[], Expert] | None = None,
    reply: Callable[[str], str] = str,
) -> Example:
    """Play a task to its end, close the simulator and return the episode.

    expert: makes an expert after the reset; None means the simulator's own.
    reply: action -> the model's whole reply that takes it.
    Errors: ExpertFailed if the task cannot be solved under the simulator's options.
    """
    try:
        first, turns = simulator.reset(task_id), []
        guide = (expert or simulator.expert)()
        while True:
            action = reply(guide.next_action())
            result = simulator.step(action)
            turns.append(ExampleTurn(action=action, observation=result.observation))
            if result.terminated or result.truncated:
                if not result.success:
                    raise ExpertFailed(f"the example of task {task_id} is not solved")
                return Example(observation=first, turns=tuple(turns))
    finally:
        simulator.close()


def solved(plays: Iterable[Callable[[], Example]]) -> tuple[Example, ...]:
    """Call `plays` and return their examples in order, without those that raise ExpertFailed."""
    examples = []
    for play in plays:
        with suppress(ExpertFailed):
            examples.append(play())
    return tuple(examples)


def recorded(path: Path) -> tuple[Example, ...]:
    """Read the examples that `record` has written to a file."""
    return _EXAMPLES.validate_json(path.read_bytes())


def record(path: Path, examples: tuple[Example, ...]) -> None:
    path.write_bytes(_EXAMPLES.dump_json(examples, indent=1) + b"\n")
