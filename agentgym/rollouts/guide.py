"""Instructions and worked examples of an environment: the text that episodes begin with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agentgym.config import ConfigError
from agentgym.rollouts.episode import reply_naming
from envs.wire import Example

INTRODUCTION = (
    "Worked examples. Observation is what you are shown, Reply is a whole reply of yours."
)
ENDING = "End of the examples."


@dataclass(frozen=True, slots=True)
class Guide:
    """The instructions and worked examples of one environment; empty if its servers have none."""

    instructions: str = ""
    examples: tuple[Example, ...] = ()

    def opening(self, env: str, num_examples: int, action_format: Literal["plain", "react"]) -> str:
        """Return the instructions with the first worked examples.
        Errors: ConfigError if the servers offer fewer.
        """
        if num_examples > len(self.examples):
            raise ConfigError(
                f"{env}: examples {num_examples}, and its servers offer"
                f" {len(self.examples) or 'no'} worked examples; lower rollout.examples, or"
                " examples of the protocol"
            )
        if not num_examples:
            return self.instructions
        selected = self.examples[:num_examples]
        plays = ["\n".join(_lines(example, action_format)) for example in selected]
        titled = [f"Example {number}\n{play}" for number, play in enumerate(plays, start=1)]
        return "\n\n".join([self.instructions, INTRODUCTION, *titled, ENDING])


def _lines(example: Example, action_format: Literal["plain", "react"]) -> Iterator[str]:
    yield f"Observation: {example.observation}"
    for turn in example.turns:
        yield f"Reply: {reply_naming(turn.action, action_format)}"
        yield f"Observation: {turn.observation}"
