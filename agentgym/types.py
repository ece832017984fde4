"""The data that crosses room boundaries during one sample's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, Self


class Status(StrEnum):
    """How an episode ended. Only the first four carry a reward."""

    TERMINATED = "terminated"  # the environment said so
    MAX_TURNS = "max_turns"  # cut by the horizon
    MAX_TOKENS = "max_tokens"  # cut by the context length
    ENV_LIMIT = "env_limit"  # cut by the simulator's own step limit
    ENV_ERROR = "env_error"  # the environment failed: never a reward of 0
    TIMEOUT = "timeout"  # past its deadline: never a reward of 0

    @property
    def is_valid(self) -> bool:
        """True where the episode counts in losses, group statistics and scores."""
        return self not in (Status.ENV_ERROR, Status.TIMEOUT)


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One task of one environment. `task_id` is AgentGym's `data_idx`, >= 0."""

    env: str
    task_id: int
    split: str = "train"

    @property
    def item_id(self) -> str:
        """AgentGym's textual id, for example `babyai_17`."""
        return f"{self.env}_{self.task_id}"


class Endpoint(str):
    """The URL of an environment server, with the bearer token it asks for.

    The token travels with it, to other processes too; text, JSON, logs and repr show the URL alone.
    """

    token: str

    def __new__(cls, url: str, token: str = "") -> Self:
        endpoint = super().__new__(cls, url)
        endpoint.token = token
        return endpoint


Endpoints = Mapping[str, Sequence[str]]  # environment -> URLs of its servers


class SampleKey(NamedTuple):
    """Names one draw of randomness.
    Equal keys give equal draws on every machine, in any order of execution.
    """

    seed: int
    step: int  # optimizer step the sample is for; evaluations use 0
    item_id: str
    sample: int  # which sample of the item, 0 .. group_size - 1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy samples one action."""

    key: SampleKey
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled action, as the engine produced it."""

    ids: tuple[int, ...]  # includes the stop token when stop_reason is "stop"
    # natural log, of the distribution sampled from (temperature applied)
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    version: int  # of the weights that sampled it


class Policy(Protocol):
    """What generates. Weights change at turn boundaries only."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion: ...

    async def publish(self, weights: dict[str, Any], version: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and the observation that answers it."""

    action: str  # text sent to the environment
    observation: str  # text that came back
    reward: float
    start: int  # action tokens are input_ids[start:end]
    end: int
    version: int  # of the weights that sampled the action


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode. The three token fields have one length, T."""

    item: Item
    sample: int
    step: int  # optimizer step it was sampled for
    max_turns: int
    status: Status
    reward: float | None  # sum of the turns' rewards; None where the environment failed
    success: bool
    first_observation: str
    turns: tuple[Turn, ...]
    input_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]  # true on tokens the policy sampled
    logprobs: tuple[float, ...]  # of the sampling policy; 0.0 where action_mask is false
    temperature: float = 1.0
    num_attempts: int = 1
    error: str | None = None
    # seconds; the only field not reproducible
    timing: dict[str, float] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` gives an equal object back.
        By hand: `asdict` copies token by token, 20 times slower.
        """
        row: dict[str, Any] = {name: getattr(self, name) for name in _TRAJECTORY_FIELDS}
        return {
            **row,
            "item": asdict(self.item),
            "status": str(self.status),
            "turns": [asdict(turn) for turn in self.turns],
        }

    @staticmethod
    def from_json(row: dict[str, Any]) -> Trajectory:
        """Errors: KeyError or TypeError where the row is not one of ours."""
        return Trajectory(
            **{
                **row,
                "item": Item(**row["item"]),
                "status": Status(row["status"]),
                "turns": tuple(Turn(**turn) for turn in row["turns"]),
                "input_ids": tuple(row["input_ids"]),
                "action_mask": tuple(row["action_mask"]),
                "logprobs": tuple(row["logprobs"]),
            }
        )


_TRAJECTORY_FIELDS = tuple(each.name for each in fields(Trajectory))


class EngineMismatch(RuntimeError):
    """The engine does not sample from the policy the learner trains."""
