"""Every message between a trainer and an environment server, in one place.

A request acts at most once: `create` carries a request key, `step` the number of its turn, and the
server answers a repeated request with the stored reply.
Errors are status codes with an `ErrorReply` body:

401 unauthorized · 403 forbidden · 404 unknown_session · 409 turn_mismatch · 410 session_gone · 422
bad_request (invalid HTTP or unknown route: 400, 404, 405, 408, 415, 431) · 500 env_crashed |
grader_failed | expert_failed · 503 full | draining | not_ready
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

PROTOCOL_VERSION = 3
# environment variable of server and client: the bearer token that the server requires
TOKEN_VARIABLE = "AGENTGYM_ENV_TOKEN"  # noqa: S105
MAX_ACTION_CHARS = 16_384
MAX_BATCH = 256  # requests
# keys of a step's `info` that mean the same in every environment; others are the environment's own
FAMILY = "family"  # text: the kind of task, equal at every turn; results are grouped by it
INVALID = "invalid"  # true if the action was not understood or is impossible, else absent
PARTS = "parts"  # at the judged turn: the components of its outcome, name -> number


class Message(BaseModel):
    """Base of all messages. Unknown fields are refused: a misspelt one must not be ignored."""

    # by default pydantic caches the last 16,384 texts it parsed; they would fragment the memory
    # that closed sessions give back
    model_config = ConfigDict(extra="forbid", frozen=True, cache_strings="keys")


class ErrorKind(StrEnum):
    """The kind of error, for programs; `ErrorReply.message` is for people."""

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"  # wrong Host, or a request by a web page of another site
    UNKNOWN_SESSION = "unknown_session"
    TURN_MISMATCH = "turn_mismatch"
    SESSION_GONE = "session_gone"
    BAD_REQUEST = "bad_request"
    ENV_CRASHED = "env_crashed"
    GRADER_FAILED = "grader_failed"  # the episode ended and could not be judged
    EXPERT_FAILED = "expert_failed"  # no action from the expert; the session stays open
    FULL = "full"
    DRAINING = "draining"
    NOT_READY = "not_ready"  # reply to /readyz: the scripted episode has not passed yet


class ErrorReply(Message):
    """Body of every reply whose status is not 200, except on AgentGym's and OpenEnv's routes."""

    kind: ErrorKind
    message: str
    expected_turn: int | None = None  # with turn_mismatch
    retry_after_s: float | None = None  # with status 503


class ExampleTurn(Message):
    """One turn of a worked example."""

    action: str
    observation: str  # the answer to the action


class Example(Message):
    """A worked example: a short solved episode of a task that is in no shipped task list."""

    observation: str  # the first one
    turns: tuple[ExampleTurn, ...] = Field(min_length=1)


class InfoReply(Message):
    """Description of the server; `GET /info`."""

    env: str
    protocol_version: int = PROTOCOL_VERSION
    options: dict[str, Any]  # the simulator's options, as served
    instructions: str  # the instructions for a language model
    examples: tuple[Example, ...] = ()  # worked examples, the simplest first
    offers_expert: bool
    offers_render: bool
    takes_batches: bool  # there is a `/batch`
    max_sessions: int
    active_sessions: int
    session_ttl_s: float
    instance: str  # unguessable, new at every server start
    pid: int


class CreateRequest(Message):
    """`POST /create`: open a session on a task. The same request key gives the same session."""

    request_key: str = Field(min_length=1, max_length=200)
    task_id: int = Field(ge=0, lt=2**53, strict=True)  # strict: `true` and "1" are not numbers


class CreateReply(Message):
    """Reply to a create: the session and its first observation."""

    session_id: str
    observation: str
    session_ttl_s: float  # an idle session is closed after this


class StepRequest(Message):
    """`POST /step`: the action of turn 1, 2, ... A repeated turn gets the stored reply."""

    session_id: str = Field(min_length=1, max_length=64)
    turn: int = Field(ge=1, strict=True)
    action: str = Field(max_length=MAX_ACTION_CHARS)


class StepReply(Message):
    """The environment's answer to a step."""

    turn: int
    observation: str
    reward: FiniteFloat  # of this turn; the episode's outcome is the sum
    terminated: bool  # the task is over
    truncated: bool  # the simulator's own step limit is reached
    success: bool
    info: dict[str, Any] = Field(default_factory=dict)  # FAMILY, INVALID, PARTS, and further keys


class SessionRequest(Message):
    """A request that names only an open session: `POST /close`, `POST /expert`, and the queries of
    `GET /observation`, `GET /render` and `GET /hints`.
    """

    session_id: str = Field(min_length=1, max_length=64)


class ObservationReply(Message):
    """`GET /observation?session_id=`: the last observation and its turn."""

    turn: int
    observation: str


TEXTS = ("text/plain", "application/json")  # media types of rendered states sent without base64


class RenderReply(Message):
    """`GET /render?session_id=`: the current state as a picture, text or JSON."""

    media_type: str  # "image/png" (data is base64), or one of TEXTS
    data: str


class HintsReply(Message):
    """`GET /hints?session_id=`, of environments that offer hints: suggested actions."""

    actions: list[str]


class CloseReply(Message):
    """Reply to a close; `closed` is false if there was nothing left to close."""

    closed: bool


class BatchRequest(Message):
    """`POST /batch`: requests of `/step`, `/create` and `/close` for many sessions at once.
    Only servers with fast steps offer it, because the first answer waits for the last.
    """

    requests: tuple[
        Annotated[StepRequest | CreateRequest | SessionRequest, Field(union_mode="left_to_right")],
        ...,
    ] = Field(max_length=MAX_BATCH)


class BatchReply(Message):
    """The replies to a batch's requests, in their order."""

    replies: tuple[
        Annotated[
            StepReply | CreateReply | CloseReply | ErrorReply, Field(union_mode="left_to_right")
        ],
        ...,
    ]


class ExpertReply(Message):
    """`POST /expert`, only on servers started with --expert: the expert's next action."""

    action: str


class ReadyReply(Message):
    """`GET /readyz`: 200 once a scripted episode has passed; 503 before, after its failure, and
    while draining.
    """

    ready: bool
    active_sessions: int
    max_sessions: int
