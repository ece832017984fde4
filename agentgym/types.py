"""The data that crosses room boundaries during one sample's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


class Status(StrEnum):
    """How an episode ended. Only the first four carry a reward."""

    TERMINATED = "terminated"  # the environment said so
    MAX_TURNS = "max_turns"  # cut by the horizon
    MAX_TOKENS = "max_tokens"  # cut by the context length
    ENV_LIMIT = "env_limit"  # cut by the simulator's own step limit
    ENV_ERROR = "env_error"  # the environment failed: never a reward of 0
    GRADER_ERROR = "grader_error"  # it ended, and nobody could judge it: never a reward of 0
    TIMEOUT = "timeout"  # past its deadline: never a reward of 0
    INTERRUPTED = "interrupted"  # the policy could not go on: never a reward of 0

    @property
    def is_valid(self) -> bool:
        """True where the episode counts in losses, group statistics and scores."""
        return self not in _FAILED


_FAILED = frozenset({Status.ENV_ERROR, Status.GRADER_ERROR, Status.TIMEOUT, Status.INTERRUPTED})


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
    """The URL of an environment server, with the bearer token it asks for, and perhaps a file of
    this machine that lists the servers behind it (agentgym/deploy/fleets/addresses.py).

    Both travel with it, to other processes too; text, JSON, logs and repr show the URL alone.
    """

    token: str
    listing: str

    def __new__(cls, url: str, token: str = "", listing: str = "") -> Self:
        endpoint = super().__new__(cls, url)
        endpoint.token = token
        endpoint.listing = listing
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


class Sampling(NamedTuple):
    """How a policy samples one action."""

    key: SampleKey
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 16

    def require_room(self, prompt_ids: Sequence[int], context_tokens: int) -> None:
        """Errors: ValueError where prompt and action cannot fit so many tokens."""
        if not prompt_ids or self.max_new_tokens < 1:
            raise ValueError(
                f"nothing to sample from {len(prompt_ids)} prompt tokens with max_new_tokens"
                f" {self.max_new_tokens}"
            )
        if len(prompt_ids) + self.max_new_tokens > context_tokens:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens + max_new_tokens {self.max_new_tokens}"
                f" exceeds the context of {context_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled action, as the engine produced it."""

    ids: tuple[int, ...]  # includes its stop token when stop_reason is "stop"
    # natural log, of the distribution sampled from (temperature applied)
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    version: int  # of the weights that sampled it


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What engines did since they began; the difference of two is what they did between.
    All zero of an engine that does not measure it.
    """

    prompt_tokens: int = 0  # of prompts that were read,
    cached_tokens: int = 0  # and of these, found in the engine's cache
    busy_s: float = 0.0  # seconds with a sequence in work
    # number of requests that have not begun -> seconds with so many; in all, the engines' time
    depth_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds of engine: of two engines twice as many as have passed."""
        return sum(self.depth_s.values())

    @property
    def busy_frac(self) -> float:
        """Of the engines' time; 1 where nothing was measured."""
        total = self.total_s
        return min(max(self.busy_s / total, 0.0), 1.0) if total > 0 else 1.0

    @property
    def mean_depth(self) -> float:
        """Requests that wait, of an engine, over its time; 0 where nothing was measured."""
        waited = sum(depth * seconds for depth, seconds in self.depth_s.items())
        return waited / self.total_s if self.depth_s else 0.0

    def __add__(self, other: EngineUsage) -> EngineUsage:
        return self._with(other, 1)

    def __sub__(self, other: EngineUsage) -> EngineUsage:
        return self._with(other, -1)

    def _with(self, other: EngineUsage, sign: int) -> EngineUsage:
        depths = self.depth_s.keys() | other.depth_s.keys()
        seconds = {
            depth: self.depth_s.get(depth, 0.0) + sign * other.depth_s.get(depth, 0.0)
            for depth in sorted(depths)
        }
        return EngineUsage(
            self.prompt_tokens + sign * other.prompt_tokens,
            self.cached_tokens + sign * other.cached_tokens,
            self.busy_s + sign * other.busy_s,
            {depth: passed for depth, passed in seconds.items() if passed > 0},
        )


class Delivery(Protocol):
    """New weights on their way to a policy; see `agentgym.models.transport`."""

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str:
        """sha256 of them as a safetensors file, of the sender."""
        ...

    async def weights(self) -> dict[str, Tensor]:
        """The receiver's own copy of all of them, by name; asked for once.
        Errors: EngineMismatch where others arrived than were sent.
        """
        ...


class Policy(Protocol):
    """What samples tokens, whichever engine does: all that rollouts, canary, evaluation and audit
    know of it.
    """

    @property
    def version(self) -> int:
        """Of the weights it holds."""
        ...

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """One action: until a stop token or `max_new_tokens`. Errors: ValueError where prompt
        and action cannot fit the context; RuntimeError where the engine fails.
        """
        ...

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Natural-log probability of each token after the first, at temperature 1: [T - 1] float32
        on the CPU for a sequence of T.
        """
        ...

    async def publish(self, delivery: Delivery) -> None:
        """First take the weights while sampling goes on, then change to them between turns:
        running actions end, later ones wait.
        Errors: ValueError where a version does not grow or the weights do not fit, EngineMismatch
        where others arrived than were sent; the policy then goes on as before.
        """
        ...

    async def usage(self) -> EngineUsage:
        """Since it began."""
        ...

    async def sleep(self) -> None:
        """Give back what only sampling needs; running actions end, later ones wait for `wake`."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """End it; who still waits hears of it."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and the observation that answers it."""

    action: str  # text sent to the environment
    observation: str  # text that came back
    reward: float
    start: int = 0  # action tokens are input_ids[start:end]; both 0 without a token record
    end: int = 0
    version: int = 0  # of the weights that sampled the action
    reply: str = ""  # all that was said, where that is more than the action
    info: Mapping[str, Any] = field(
        default_factory=dict
    )  # the environment's, beside the observation
    # seconds until the policy had answered, and the environment
    generate_s: float = field(default=0.0, compare=False)
    env_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update made of an episode: room for a viewer. The sequences are of its action
    tokens, [n] each; empty where the episode was not among those whose tokens are kept.
    """

    logprobs: tuple[float, ...] = ()  # of the learner before the update, nats
    advantages: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()  # new to old probability, after the update
    excluded: str = ""  # why it did not enter the loss; empty: it did
    # of the learner's distributions before the update, nats; older records have none
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a policy's calls took, those that failed too. Tokens are sums of what was told: where
    calls are untold, the whole is not known, and more than the sum.
    """

    num_calls: int = 0
    num_failed: int = 0  # of these, without an answer that could be used
    input_tokens: int = 0  # of prompts
    cached_tokens: int = 0  # of these, read from a cache
    output_tokens: int = 0
    num_untold: int = 0  # calls that may have taken tokens and told none
    num_cache_untold: int = 0  # calls that told their tokens, and not which were cached
    num_cut: int = 0  # replies that ended at the limit of their tokens
    num_filtered: int = 0  # replies that the endpoint's filter held back

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def known(self) -> dict[str, int | None]:
        """Input, cached and output tokens; None where that is not known."""
        cached = None if self.num_untold or self.num_cache_untold else self.cached_tokens
        told = not self.num_untold
        return {
            "input": self.input_tokens if told else None,
            "cached": cached,
            "output": self.output_tokens if told else None,
        }


def flat(record: Item | Usage) -> dict[str, Any]:
    """Field -> value, of a record that holds plain ones; `asdict` would copy each."""
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: a conversation and, of policies that have tokens, their record.
    The three token fields have one length, T; 0 without such a record.
    """

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
    id: str = ""  # unique among the episodes of a step; empty in records of schema 1
    learned: Learned | None = None
    usage: Usage | None = None  # of this attempt's calls, of policies that count them themselves
    # seconds: generate_s, env_s, wall_s, and began_s since 1970; with the turns' times the only
    # ones not reproducible
    timing: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the weights that sampled it, ascending."""
        return tuple(sorted({turn.version for turn in self.turns}))


class EngineMismatch(RuntimeError):
    """The engine does not sample from the policy the learner trains."""


class TransportBroken(RuntimeError):
    """Weights did not get to all of a group: one of them died, hangs, or was too slow."""
