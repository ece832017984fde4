"""OpenEnv's contract: one WebSocket is one environment, with the messages reset, step, state and
close.

Sessions, limits and the reaper are those of the other routes.
A reset's `seed` is the id of the task, an action is `{"message": text}`, an observation `{"text":
text}`; its metadata contain success, truncation and the simulator's own info.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from envs.refusals import Refused
from envs.sessions import Sessions
from envs.wire import (
    MAX_ACTION_CHARS,
    CreateReply,
    CreateRequest,
    ErrorKind,
    StepReply,
    StepRequest,
)

PATH = "/ws"
SEND_S = 20.0  # limit for sending a reply: a client that reads more slowly is dropped

Json = dict[str, Any]


class ErrorCode(StrEnum):
    """OpenEnv's error codes."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"  # this code and the two below end the connection
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


ENDING = (ErrorCode.CAPACITY_REACHED, ErrorCode.FACTORY_ERROR, ErrorCode.SESSION_ERROR)


class Reset(BaseModel):
    """Data of a reset. Further fields are ignored, as OpenEnv's servers do."""

    # the task's id; None: the task of the server's scripted episode
    seed: int | None = Field(default=None, ge=0, lt=2**53, strict=True)
    episode_id: str | None = Field(default=None, max_length=255)  # None: the server makes one


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str = Field(max_length=MAX_ACTION_CHARS)
    metadata: Json = Field(default_factory=dict)  # ignored


class Observation(BaseModel):
    text: str
    metadata: Json  # turn, success, truncated, info


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0
    task_id: int | None = None


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetAsked(_Asked):
    type: Literal["reset"]
    data: Reset = Reset()


class StepAsked(_Asked):
    type: Literal["step"]
    data: Action


class StateAsked(_Asked):
    type: Literal["state"]


class CloseAsked(_Asked):
    type: Literal["close"]


Asked = ResetAsked | StepAsked | StateAsked | CloseAsked
ASKED: TypeAdapter[Asked] = TypeAdapter(Annotated[Asked, Field(discriminator="type")])


class Failed(Exception):
    """A message that cannot be carried out; `reply` is the error reply to it."""

    def __init__(self, code: ErrorCode, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.reply = {"type": "error", "data": {"message": message, "code": code.value, **details}}


class OpenEnv:
    """OpenEnv's routes on one server; they share its sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._num_open = 0  # connections, also those without a session yet

    def table(self) -> Iterator[tuple[str, Callable[[Request], Awaitable[Response]], str]]:
        """Yield (path, handler, summary) of each HTTP route."""
        yield "/health", self._health, "as OpenEnv's servers: may it be used"
        yield "/metadata", self._metadata, "as OpenEnv's servers: name and instructions"
        yield "/schema", self._schema, "as OpenEnv's servers: actions, observations and state"

    async def connected(self, websocket: WebSocket) -> None:
        """Serve one connection, from its acceptance to its end; then close its session.
        A full or draining server only sends an error. A client that is gone or does not read for
        SEND_S ends the connection without an error here.
        """
        seat = Seat(self._sessions)
        self._num_open += 1
        try:
            await websocket.accept()
            try:
                self._admit()
                await _serve(websocket, seat, self._sessions.settings.session_ttl_s)
            except Failed as error:
                await _tell(websocket, error.reply)
            await websocket.close()
        except (WebSocketDisconnect, TimeoutError):  # the client is gone or does not read
            pass
        finally:
            self._num_open -= 1
            await seat.leave()

    def _admit(self) -> None:
        """Check that a session is free for this connection, so that a full server refuses before
        the first reset.
        Errors: Failed if the server is full or draining.
        """
        limit, taken = self._sessions.settings.max_sessions, self._sessions.info().active_sessions
        if self._sessions.draining or max(taken, self._num_open - 1) >= limit:
            self._sessions.metrics.rejected.inc()
            raise _full(self._sessions)

    async def _health(self, _: Request) -> Response:
        usable = self._sessions.ready and not self._sessions.draining
        status = "healthy" if usable else "unhealthy"
        return JSONResponse({"status": status}, 200 if usable else 503)

    async def _metadata(self, _: Request) -> Response:
        spec = self._sessions.spec
        return JSONResponse({"name": spec.name, "description": spec.instructions})

    async def _schema(self, _: Request) -> Response:
        models: tuple[type[BaseModel], ...] = (Action, Observation, State)
        return JSONResponse({model.__name__.lower(): model.model_json_schema() for model in models})


class Seat:
    """The environment of one connection; each reset closes its session and opens a new one."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._session = ""
        self._turn = 0
        self._ended = False
        self._state = State()

    async def answer(self, message: ResetAsked | StepAsked | StateAsked) -> Json:
        """Carry out a message (reset, step or state) and return the reply. Errors: Failed."""
        if isinstance(message, ResetAsked):
            return await self._reset(message.data)
        if isinstance(message, StepAsked):
            return await self._step(message.data.message)
        return {"type": "state", "data": self._state.model_dump()}

    async def leave(self) -> None:
        if self._session:
            await self._sessions.close(self._session)
            self._session = ""

    async def _reset(self, message: Reset) -> Json:
        await self.leave()
        task_id = self._sessions.spec.probe_task if message.seed is None else message.seed
        try:
            request = CreateRequest(request_key=f"openenv-{secrets.token_hex(16)}", task_id=task_id)
            opened = CreateReply.model_validate_json(await self._sessions.create(request))
        except Refused as error:
            raise self._failed(error, crashed=ErrorCode.FACTORY_ERROR) from error
        self._session, self._turn, self._ended = opened.session_id, 0, False
        self._state = State(episode_id=message.episode_id or secrets.token_hex(16), task_id=task_id)
        metadata = {"turn": 0, "success": False, "truncated": False, "info": {}}
        return _observed(opened.observation, None, False, metadata)

    async def _step(self, message: str) -> Json:
        if not self._session:
            raise Failed(ErrorCode.EXECUTION_ERROR, "there is no episode; reset first")
        if self._ended:
            ended = f"the episode ended at turn {self._turn}; reset for another one"
            raise Failed(ErrorCode.EXECUTION_ERROR, ended)
        try:
            turn = self._turn + 1
            request = StepRequest(session_id=self._session, turn=turn, action=message)
            raw = await self._sessions.step(request)
        except Refused as error:
            self._session = ""  # it crashed, or the reaper closed it
            raise self._failed(error, crashed=ErrorCode.EXECUTION_ERROR) from error
        reply = StepReply.model_validate_json(raw)
        self._turn, self._ended = reply.turn, reply.terminated or reply.truncated
        self._state.step_count = reply.turn
        shown = ("turn", "success", "truncated", "info")
        metadata = {name: getattr(reply, name) for name in shown}
        return _observed(reply.observation, reply.reward, self._ended, metadata)

    def _failed(self, error: Refused, *, crashed: ErrorCode) -> Failed:
        kind = error.reply.kind
        self._sessions.metrics.errors.labels(kind.value).inc()
        if kind in (ErrorKind.FULL, ErrorKind.DRAINING):
            return _full(self._sessions)
        if kind is ErrorKind.BAD_REQUEST:  # no such task
            return Failed(ErrorCode.EXECUTION_ERROR, error.reply.message)
        failures = (ErrorKind.ENV_CRASHED, ErrorKind.GRADER_FAILED)
        code = crashed if kind in failures else ErrorCode.SESSION_ERROR
        is_factory = code is ErrorCode.FACTORY_ERROR
        details = {"factory_name": self._sessions.spec.name} if is_factory else {}
        return Failed(code, error.reply.message, **details)


async def _serve(websocket: WebSocket, seat: Seat, ttl_s: float) -> None:
    """Answer messages until the client asks to close; failed ones get an error as their reply.
    After ttl_s without a reset or a step the connection ends, as the reaper ends the session.

    Errors: Failed if the connection must end, WebSocketDisconnect, TimeoutError (reply not read).
    """
    loop = asyncio.get_running_loop()
    idle_until = loop.time() + ttl_s
    while True:
        try:
            async with asyncio.timeout_at(idle_until):
                raw = await _receive(websocket)
        except TimeoutError:
            raise Failed(ErrorCode.SESSION_ERROR, f"no turn for {ttl_s:g} s") from None
        try:
            message = _parsed(raw)
            if isinstance(message, CloseAsked):
                return
            reply = await seat.answer(message)
            if not isinstance(message, StateAsked):
                idle_until = loop.time() + ttl_s
        except Failed as error:
            if error.code in ENDING:
                raise
            reply = error.reply
        await _tell(websocket, reply)


async def _receive(websocket: WebSocket) -> str | bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    text: str | None = message.get("text")
    return text if text is not None else bytes(message["bytes"])


async def _tell(websocket: WebSocket, reply: Json) -> None:
    async with asyncio.timeout(SEND_S):
        await websocket.send_text(json.dumps(reply))  # ASCII: lone surrogates are escaped


def _parsed(raw: str | bytes) -> Asked:
    """Parse a message. Errors: Failed if it is no JSON, of an unknown type, or has bad fields."""
    try:
        return ASKED.validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    kind, message = problems[0]["type"], problems[0]["msg"]
    if kind == "json_invalid":
        raise Failed(ErrorCode.INVALID_JSON, message)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        raise Failed(ErrorCode.UNKNOWN_TYPE, "type must be reset, step, state or close")
    location = ".".join(map(str, problems[0]["loc"]))
    raise Failed(ErrorCode.VALIDATION_ERROR, f"{location}: {message}", errors=problems)


def _observed(text: str, reward: float | None, done: bool, metadata: Json) -> Json:
    """Return the reply with an observation. It contains the metadata twice, as in OpenEnv: older
    clients read the inner ones.
    """
    observation = {"text": text, "metadata": metadata}
    data = {"observation": observation, "reward": reward, "done": done, "metadata": metadata}
    return {"type": "observation", "data": data}


def _full(sessions: Sessions) -> Failed:
    limit, active = sessions.settings.max_sessions, sessions.info().active_sessions
    full = f"all {limit} sessions are taken"
    message = "the server is shutting down" if sessions.draining else full
    code = ErrorCode.CAPACITY_REACHED
    return Failed(code, message, active_sessions=active, max_sessions=limit)
