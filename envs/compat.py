"""AgentGym's own routes under `/agentgym`, so that its clients work unchanged against this server.

Shapes and error style are AgentGym's: errors have status 200 and a body `{"error": text}` if its
server for the environment does so. Sessions, limits and the reaper are those of our own routes.
Ids are unguessable integers below 2**53.
Two deliberate differences: a finished episode pays no further reward, and `close` of an unknown id
always returns `false`.
"""

from __future__ import annotations

import base64
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from envs.dialect import Dialect, Nothing, Place
from envs.refusals import Refused, retry_header
from envs.sessions import Sessions
from envs.wire import (
    MAX_ACTION_CHARS,
    TEXTS,
    CreateReply,
    CreateRequest,
    ErrorKind,
    StepReply,
    StepRequest,
)

Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
Action = Callable[[Any], Awaitable[object]]  # validated body or query -> JSON of the reply
MAX_ID = 2**53
MAX_BODY_BYTES = 256 * 1024


class EnvId(BaseModel):
    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))


class Step(EnvId):
    action: str = Field(max_length=MAX_ACTION_CHARS)


class AgentGymRoutes:
    """AgentGym's routes on one server; they share its sessions."""

    def __init__(self, sessions: Sessions, dialect: Dialect) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._spec = sessions.spec.agentgym or sessions.spec
        self._places: dict[int, Place] = {}
        self._counter = itertools.count()

    def table(self) -> Iterator[tuple[str, str, type[BaseModel] | None, Handler]]:
        """Yield (method, path, model of the body or query, handler) of every route."""
        dialect = self._dialect
        routes: list[tuple[str, str, type[BaseModel] | None, Action]] = [
            ("GET", "", None, self._greet),
            ("POST", "create", dialect.create, self._create),
            ("POST", "reset", dialect.reset, self._reset),
            ("POST", "step", Step, self._step),
            ("POST", "close", EnvId, self._close),
            ("POST", "render", EnvId, self._render),
            ("GET", "observation", EnvId, partial(self._show, dialect.looked or dialect.shown)),
        ]
        if dialect.detailed is not None:
            routes.append(("GET", "detail", EnvId, partial(self._show, dialect.detailed)))
        if dialect.visual is not None:
            routes.append(("POST", "step_visual", Step, partial(self._step_visual, dialect.visual)))
        for name, view in dialect.views.items():
            routes.append(("GET", name, EnvId, partial(self._view, view)))
        for method, name, model, act in routes:
            yield method, f"/agentgym/{name}", model, partial(self._answer, model, act)

    async def _greet(self, _: None) -> str:
        return self._dialect.greeting

    async def _create(self, body: BaseModel) -> object:
        self._forget()
        if len(self._places) >= (limit := self._sessions.settings.max_sessions):
            raise Refused(ErrorKind.FULL, f"all {limit} environments are taken")
        counts = self._dialect.counts
        task = next(self._counter) if counts else self._dialect.names_task(body)
        env = Place(1 + secrets.randbelow(MAX_ID - 1), _checked(task), time.monotonic())
        if counts:
            await self._open(env)
        self._places[env.id] = env
        return self._dialect.created(env)

    async def _reset(self, body: Any) -> object:
        env = self._find(body.id)
        async with env.lock:
            await self._end(env)
            env.task = _checked(env.task if body.data_idx is None else body.data_idx)
            try:
                await self._open(env)
            except Refused as error:
                failures = (ErrorKind.ENV_CRASHED, ErrorKind.BAD_REQUEST)
                if self._dialect.reset_failed is None or error.reply.kind not in failures:
                    raise
                return self._dialect.reset_failed
            return self._dialect.shown(env)

    async def _step(self, body: Any) -> Json:
        env = self._find(body.id)
        async with env.lock:
            if env.done:
                raise _finished(env)
            if not env.session:
                if env.task is None:
                    unset = f"The environment {env.id} has not been reset."
                    raise Refused(ErrorKind.BAD_REQUEST, unset)
                await self._open(env)
            request = StepRequest(session_id=env.session, turn=env.turn + 1, action=body.action)
            try:
                reply = StepReply.model_validate_json(await self._sessions.step(request))
            except Refused as error:
                broken = (ErrorKind.ENV_CRASHED, ErrorKind.GRADER_FAILED, ErrorKind.SESSION_GONE)
                if self._dialect.step_failed is None or error.reply.kind not in broken:
                    raise
                return self._dialect.step_failed(error.reply.message)
            env.turn, env.observation, env.reward = reply.turn, reply.observation, reply.reward
            env.score += reply.reward
            env.done = reply.terminated or reply.truncated
            env.truncated, env.info = reply.truncated, reply.info
            return self._dialect.stepped(env)

    async def _close(self, body: Any) -> object:
        env = self._places.pop(body.id, None)
        if env is not None:
            async with env.lock:
                await self._end(env)
        return self._dialect.closed(env is not None)

    async def _render(self, body: Any) -> str:
        env = self._begun(body.id)
        reply = await self._sessions.render(env.session)
        data = reply.data
        if reply.media_type in TEXTS:
            data = base64.b64encode(data.encode()).decode()
        return f"data:{reply.media_type};base64,{data}"

    async def _step_visual(self, visual: Callable[[Any, Json], Json], body: Any) -> object:
        answer = await self._step(body)
        session = self._find(body.id).session
        return await self._sessions.inspect(session, lambda simulator: visual(simulator, answer))

    async def _show(self, show: Callable[[Place], Any], query: Any) -> object:
        return show(self._begun(query.id))

    async def _view(self, view: Callable[[Any, Place], Any], query: Any) -> object:
        env = self._begun(query.id)
        if env.done:
            raise _finished(env)
        return await self._sessions.inspect(env.session, lambda simulator: view(simulator, env))

    async def _answer(
        self, model: type[BaseModel] | None, act: Action, request: Request
    ) -> Response:
        """Validate the request's body or query, and reply with the result of `act` or the error."""
        raw = await read_body(request) if request.method == "POST" else b""
        try:
            if model is None or model is Nothing:
                return JSONResponse(await act(model and model()))
            if request.method == "POST":
                return JSONResponse(await act(model.model_validate_json(raw)))
            return JSONResponse(await act(model.model_validate(dict(request.query_params))))
        except ValidationError as error:
            detail = [
                {"type": e["type"], "loc": ["body", *e["loc"]], "msg": e["msg"]}
                for e in error.errors(include_url=False)
            ]
            return JSONResponse({"detail": detail}, 422)
        except Refused as error:
            self._sessions.metrics.errors.labels(error.reply.kind.value).inc()
            status = 200 if self._dialect.polite and error.status != 503 else error.status
            return JSONResponse({"error": error.reply.message}, status, retry_header(error.reply))

    def _find(self, number: int) -> Place:
        env = self._places.get(number)
        if env is None:
            raise Refused(ErrorKind.UNKNOWN_SESSION, f"The id {number} is not valid.")
        env.used = time.monotonic()
        return env

    def _begun(self, number: int) -> Place:
        env = self._find(number)
        if not env.session:
            raise Refused(ErrorKind.BAD_REQUEST, "Environment not initialized")
        return env

    async def _open(self, env: Place) -> None:
        assert env.task is not None
        key = f"agentgym-{env.id}-{secrets.token_hex(8)}"
        request = CreateRequest(request_key=key, task_id=env.task)
        raw = await self._sessions.create(request, self._spec.make)
        opened = CreateReply.model_validate_json(raw)
        env.session, env.observation = opened.session_id, opened.observation
        env.prompt = f"{self._spec.instructions}\n{opened.observation}"
        env.turn, env.reward, env.score, env.done = 0, 0.0, 0.0, False
        if self._dialect.opened is not None:
            env.opening = await self._sessions.inspect(env.session, self._dialect.opened)
            env.observation = env.opening.pop("observation", env.observation)
            env.reward = env.score = env.opening.pop("score", 0.0)

    async def _end(self, env: Place) -> None:
        if env.session:
            await self._sessions.close(env.session)
            env.session = ""

    def _forget(self) -> None:
        """Drop ids unused for session_ttl_s, except during a call; their sessions were reaped."""
        oldest = time.monotonic() - self._sessions.settings.session_ttl_s
        for env in [env for env in self._places.values() if env.used < oldest]:
            if not env.lock.locked():
                del self._places[env.id]


def _finished(env: Place) -> Refused:
    return Refused(ErrorKind.SESSION_GONE, f"The task with environment {env.id} has finished.")


def _checked(task: int | None) -> int | None:
    if task is not None and not 0 <= task < MAX_ID:
        raise Refused(
            ErrorKind.BAD_REQUEST, f"data_idx must be at least 0 and below {MAX_ID}, got {task}"
        )
    return task


async def read_body(request: Request) -> bytes:
    """Return the request's body. Errors: Refused if it is longer than MAX_BODY_BYTES."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(ErrorKind.BAD_REQUEST, f"body is longer than {MAX_BODY_BYTES} bytes")
    return body
