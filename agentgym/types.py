"""Types that the subpackages exchange, from an item to its trajectory; interface of policies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


class Status(StrEnum):
    """Reason why an episode ended. Only episodes with one of the first four have a reward."""

    TERMINATED = "terminated"  # ended by the environment
    MAX_TURNS = "max_turns"  # cut by the horizon
    MAX_TOKENS = "max_tokens"  # cut by the context length
    ENV_LIMIT = "env_limit"  # cut by the simulator's own step limit
    ENV_ERROR = "env_error"  # the environment failed: never a reward of 0
    GRADER_ERROR = "grader_error"  # ended, but could not be graded: never a reward of 0
    TIMEOUT = "timeout"  # past its deadline: never a reward of 0
    INTERRUPTED = "interrupted"  # the policy could not continue: never a reward of 0

    @property
    def is_valid(self) -> bool:
        """True if the episode counts in losses, group statistics and scores."""
        return self not in _FAILED

    @property
    def is_truncated(self) -> bool:
        """True if a limit cut the episode: the horizon, the context or the simulator's own."""
        return self in _TRUNCATED


_FAILED = frozenset({Status.ENV_ERROR, Status.GRADER_ERROR, Status.TIMEOUT, Status.INTERRUPTED})
_TRUNCATED = frozenset({Status.MAX_TURNS, Status.MAX_TOKENS, Status.ENV_LIMIT})


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
    """The URL of an environment server. `token` is the bearer token that it requires, `listing` the
    path of a file on this machine that lists the servers behind the URL (see
    agentgym/deploy/fleets/addresses.py); each may be empty.

    A pickle contains both; text, JSON, logs and repr show the URL alone.
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
    """Identity of one random draw: equal keys give equal draws, on any machine, in any order."""

    seed: int
    step: int  # optimizer step the sample is for; evaluations use 0
    item_id: str
    sample: int  # which sample of the item, 0 .. group_size - 1
    turn: int = 0

    def chance(self, *purpose: str) -> float:
        """Return a number in [0, 1) that is a function of the key and the purpose."""
        text = "\x1f".join(map(str, (*self, *purpose))).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / 2**48

    def is_drawn(self, share: float) -> bool:
        """Return True if the engine is asked for the log-probabilities of this action, when it is
        asked for those of a share of all actions. The engine cannot choose which.
        """
        return share >= 1 or self.chance("logprobs") < share


class Sampling(NamedTuple):
    """Settings with which a policy samples one action."""

    key: SampleKey
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 16
    logprobs: bool = True  # the completion needs the log-probabilities of its tokens

    def require_room(self, prompt_ids: Sequence[int], context_tokens: int) -> None:
        """Raise ValueError if the prompt is empty, if `max_new_tokens` is below 1, or if both
        together are more than `context_tokens`.
        """
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
    # natural log, at the sampling's temperature; may be empty if it does not ask for them
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    version: int  # of the weights that sampled it


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Work of engines since they started; subtract two of these to get the work in between.
    All zero if the engine reports no usage.
    """

    prompt_tokens: int = 0  # of all prompts
    cached_tokens: int = 0  # of these, found in the engine's cache
    busy_s: float = 0.0  # seconds with at least one running sequence
    # number of waiting requests -> seconds with that number; they add up to the engines' time
    depth_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Measured engine seconds: two engines count twice the elapsed time."""
        return sum(self.depth_s.values())

    @property
    def busy_frac(self) -> float:
        """Busy share of the engines' time, 0 to 1; 1 if `depth_s` was not measured."""
        total = self.total_s
        return min(max(self.busy_s / total, 0.0), 1.0) if total > 0 else 1.0

    @property
    def mean_depth(self) -> float:
        """Mean number of waiting requests of an engine over time; 0 if nothing was measured."""
        waited = sum(depth * seconds for depth, seconds in self.depth_s.items())
        return waited / self.total_s if self.total_s > 0 else 0.0

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
        """The sender's digest of the weights, see `weights_digest`."""

    async def weights(self) -> dict[str, Tensor]:
        """Receive the weights and return them by name, as copies that the caller may keep. Call it
        once: a broadcast is not repeated. Errors: EngineMismatch, TransportBroken.
        """


class Policy(Protocol):
    """A model that samples tokens, for rollouts, evaluations and audits. Engines implement it."""

    @property
    def version(self) -> int:
        """Version of the weights that it samples with."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one action, until a stop token or `max_new_tokens`.
        Errors: ValueError if prompt and action cannot fit the context; RuntimeError if the engine
        fails.
        """

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """Natural-log probability of each token after the first, at temperature 1: for each
        sequence of T tokens a tensor [T - 1], float32, on the CPU.
        """

    async def publish(self, delivery: Delivery) -> None:
        """Receive weights while sampling continues, then change to them: actions that have begun
        are sampled to their end first, later ones wait.
        Errors: ValueError if the version does not grow or the weights do not fit, EngineMismatch
        if other weights arrived than were sent; the policy then continues as before.
        """

    async def usage(self) -> EngineUsage:
        """Return the work of the policy's engines since it started."""

    async def sleep(self) -> None:
        """Wait until no action is being sampled, then free the memory that only sampling needs.
        Later actions wait for `wake`.
        """

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """Stop the policy; calls that still wait raise an error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and the observation that answers it."""

    action: str  # text sent to the environment
    observation: str  # text that came back
    reward: float
    start: int = 0  # action tokens are input_ids[start:end]; both 0 without a token record
    end: int = 0
    version: int = 0  # of the weights that sampled the action
    reply: str = ""  # the whole reply, if it is more than the action
    info: Mapping[str, Any] = field(default_factory=dict)  # further data of the environment
    has_logprobs: bool = True  # False: the engine was not asked for those of its tokens
    # seconds that the policy took to answer, and the environment
    generate_s: float = field(default=0.0, compare=False)
    env_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Learned:
    """Numbers of an episode from the optimizer step that used it, for the viewer. Each tuple has
    one number per action token, [n]; empty if these numbers were not recorded.
    """

    logprobs: tuple[float, ...] = ()  # of the learner before the update, nats
    advantages: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()  # new to old probability, after the update
    excluded: str = ""  # why it did not enter the loss; empty: it did
    # entropies of the learner's distributions before the update, nats; older records have none
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls and tokens of a policy, failed calls included. Tokens are sums of the reported ones: if
    some calls reported none, the true number is larger.
    """

    num_calls: int = 0
    num_failed: int = 0  # of these, without a usable answer
    input_tokens: int = 0  # of prompts
    cached_tokens: int = 0  # of these, read from a cache
    output_tokens: int = 0
    num_untold: int = 0  # calls that may have used tokens and reported none
    num_cache_untold: int = 0  # calls that reported tokens, but not the cached ones
    num_cut: int = 0  # replies that ended at the limit of their tokens
    num_filtered: int = 0  # replies that the endpoint's filter held back

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def known(self) -> dict[str, int | None]:
        """Numbers of tokens by `input`, `cached` and `output`; None if some calls reported none."""
        cached = None if self.num_untold or self.num_cache_untold else self.cached_tokens
        is_known = not self.num_untold
        return {
            "input": self.input_tokens if is_known else None,
            "cached": cached,
            "output": self.output_tokens if is_known else None,
        }


def flat(record: Item | Usage) -> dict[str, Any]:
    """Return field -> value of a record with plain values; `asdict` would copy each of them."""
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: a conversation and, for policies that report tokens, the token record.
    input_ids, action_mask and logprobs have one length, T; 0 without a token record.
    """

    item: Item
    sample: int
    step: int  # optimizer step it was sampled for
    max_turns: int
    status: Status
    reward: float | None  # sum of the turns' rewards; None if the environment failed
    success: bool
    first_observation: str
    turns: tuple[Turn, ...]
    input_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]  # true on tokens the policy sampled
    # of the sampling policy; 0.0 where action_mask is false, and in turns without them
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    num_attempts: int = 1
    error: str | None = None
    id: str = ""  # unique among the episodes of a step; empty in records of schema 1
    learned: Learned | None = None
    usage: Usage | None = None  # of this attempt's calls, if the policy counts them
    # seconds: generate_s, env_s, wall_s, and began_s since 1970; these and the turns' times are the
    # only values that are not reproducible
    timing: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def engine_logprobs(self) -> list[float | None]:
        """[T]: `logprobs`, but None in turns whose ones the engine was not asked for."""
        known: list[float | None] = [*self.logprobs]
        for turn in self.turns:
            if not turn.has_logprobs:
                known[turn.start : turn.end] = [None] * (turn.end - turn.start)
        return known

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the weights that sampled its actions, ascending, each once."""
        return tuple(sorted({turn.version for turn in self.turns}))


class EngineMismatch(RuntimeError):
    """The engine does not sample from the policy the learner trains."""


class TransportBroken(RuntimeError):
    """Weights did not reach all processes of a group: one died, hangs, or was too slow."""
