"""A custom environment: guess a number below 100; each reply is higher or lower."""

import random
from typing import Any

from envs.env import EnvSpec, StepResult

MANUAL = "Find the number from 0 to 99: say one, and you are told if it is higher or lower."


class Game:
    """One session. All randomness comes from the task id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def reset(self, task_id: int) -> str:
        self._sought = random.Random(f"{task_id}").randrange(self._limit)  # noqa: S311 - no secret
        self._low, self._high = 0, self._limit - 1
        return f"a number from 0 to {self._limit - 1}"

    def step(self, action: str) -> StepResult:
        text = action.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            return StepResult("invalid action", 0.0, terminated=False)
        guess = int(text)
        if guess == self._sought:
            return StepResult("found", 1.0, terminated=True, success=True)
        if guess < self._sought:
            self._low = max(self._low, guess + 1)
            return StepResult("higher", 0.0, terminated=False)
        self._high = min(self._high, guess - 1)
        return StepResult("lower", 0.0, terminated=False)

    def render(self) -> tuple[str, bytes]:
        return "text/plain", f"from {self._low} to {self._high}".encode()

    def hints(self) -> list[str]:
        return [str(self._low), self.next_action(), str(self._high)]

    def expert(self) -> "Game":
        return self

    def next_action(self) -> str:
        return str((self._low + self._high) // 2)

    def close(self) -> None:
        pass


def spec(options: dict[str, Any]) -> EnvSpec:
    """Return the environment's spec. Option limit: numbers are below it. Errors: ValueError."""
    limit = options.get("limit", 100)
    if set(options) - {"limit"} or not isinstance(limit, int) or not 1 < limit < 10**6:
        raise ValueError(f"the one option is limit, a whole number from 2 to 999999, got {options}")
    probes = ("50", "no number")
    return EnvSpec(
        "higher-lower", MANUAL, lambda: Game(limit), {"limit": limit}, probes, offers_hints=True
    )
