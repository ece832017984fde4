"""AgentGym's own routes under `/agentgym`, so that its clients work unchanged against this server.

Shapes and error style are theirs (errors are status 200 with `{"error": text}` where their server
does so); sessions, limits and the reaper are ours.
Ids are unguessable integers below 2**53.
On purpose not theirs: an episode that ended pays nothing more, and `close` of an unknown id is
`false` everywhere.
"""

from __future__ import annotations

import base64
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from envs.dialect import Dialect, Nothing, Place
from envs.sessions import Refused, Sessions
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
MAX_ID = 2**53
MAX_BODY_BYTES = 256 * 1024


class Step(BaseModel):
    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))
    action: str = Field(max_length=MAX_ACTION_CHARS)


class Named(BaseModel):
    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))


class AgentGymRoutes:
    """The routes of one server, over the sessions it has anyway."""

    def __init__(self, sessions: Sessions, dialect: Dialect) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._spec = sessions.spec.agentgym or sessions.spec
        self._places: dict[int, Place] = {}
        self._counter = itertools.count()

    def table(
        self,
    ) -> Iterator[
        tuple[str, str, type[BaseModel] | None, Callable[[Request], Awaitable[Response]]]
    ]:
        """(method, path, body, handler) of every route."""
        dialect, prefix = self._dialect, "/agentgym"
        yield "GET", f"{prefix}/", None, self._greet
        yield (
            "POST",
            f"{prefix}/create",
            dialect.create,
            self._answering(dialect.create, self._create),
        )
        yield "POST", f"{prefix}/reset", dialect.reset, self._answering(dialect.reset, self._reset)
        yield "POST", f"{prefix}/step", Step, self._answering(Step, self._step)
        yield "POST", f"{prefix}/close", Named, self._answering(Named, self._close)
        yield "POST", f"{prefix}/render", Named, self._answering(Named, self._render)
        yield "GET", f"{prefix}/observation", Named, self._showing(dialect.looked or dialect.shown)
        if dialect.detailed is not None:
            yield "GET", f"{prefix}/detail", Named, self._showing(dialect.detailed)
        if dialect.visual is not None:
            yield "POST", f"{prefix}/step_visual", Step, self._answering(Step, self._step_visual)
        for name, view in dialect.views.items():
            yield "GET", f"{prefix}/{name}", Named, self._viewing(view)

    async def _greet(self, _: Request) -> Response:
        return JSONResponse(self._dialect.greeting)

    async def _create(self, body: BaseModel) -> object:
        self._forget()
        if len(self._places) >= self._sessions.settings.max_sessions:
            raise Refused(
                ErrorKind.FULL, f"all {self._sessions.settings.max_sessions} environments are taken"
            )
        counts = self._dialect.counts
        task = next(self._counter) if counts else self._dialect.names_task(body)
        place = Place(1 + secrets.randbelow(MAX_ID - 1), _checked(task), time.monotonic())
        if counts:
            await self._open(place)
        self._places[place.id] = place
        return self._dialect.created(place)

    async def _reset(self, body: Any) -> object:
        place = self._find(body.id)
        async with place.lock:
            await self._end(place)
            place.task = _checked(place.task if body.data_idx is None else body.data_idx)
            try:
                await self._open(place)
            except Refused as error:
                if self._dialect.reset_failed is None or error.reply.kind not in (
                    ErrorKind.ENV_CRASHED,
                    ErrorKind.BAD_REQUEST,
                ):
                    raise
                return self._dialect.reset_failed
            return self._dialect.shown(place)

    async def _step(self, body: Any) -> Json:
        place = self._find(body.id)
        async with place.lock:
            if place.done:
                raise _finished(place)
            if not place.session:
                if place.task is None:
                    raise Refused(
                        ErrorKind.BAD_REQUEST, f"The environment {place.id} has not been reset."
                    )
                await self._open(place)
            request = StepRequest(session_id=place.session, turn=place.turn + 1, action=body.action)
            try:
                reply = StepReply.model_validate_json(await self._sessions.step(request))
            except Refused as error:
                if self._dialect.step_failed is None or error.reply.kind not in (
                    ErrorKind.ENV_CRASHED,
                    ErrorKind.GRADER_FAILED,
                    ErrorKind.SESSION_GONE,
                ):
                    raise
                return self._dialect.step_failed(error.reply.message)
            place.turn, place.observation, place.reward = (
                reply.turn,
                reply.observation,
                reply.reward,
            )
            place.score += reply.reward
            place.done, place.truncated, place.info = (
                reply.terminated or reply.truncated,
                reply.truncated,
                reply.info,
            )
            return self._dialect.stepped(place)

    async def _close(self, body: Any) -> object:
        place = self._places.pop(body.id, None)
        if place is not None:
            async with place.lock:
                await self._end(place)
        return self._dialect.closed(place is not None)

    async def _render(self, body: Any) -> str:
        place = self._begun(body.id)
        reply = await self._sessions.render(place.session)
        data = (
            base64.b64encode(reply.data.encode()).decode()
            if reply.media_type in TEXTS
            else reply.data
        )
        return f"data:{reply.media_type};base64,{data}"

    async def _step_visual(self, body: Any) -> object:
        answer = await self._step(body)
        place, visual = self._find(body.id), self._dialect.visual
        assert visual is not None
        return await self._sessions.inspect(
            place.session, lambda simulator: visual(simulator, answer)
        )

    def _showing(self, show: Callable[[Place], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            async def answer() -> object:
                return show(self._begun(Named.model_validate(dict(request.query_params)).id))

            return await self._reply(answer)

        return handler

    def _viewing(
        self, view: Callable[[Any, Place], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            async def answer() -> object:
                place = self._begun(Named.model_validate(dict(request.query_params)).id)
                if place.done:
                    raise _finished(place)
                return await self._sessions.inspect(
                    place.session, lambda simulator: view(simulator, place)
                )

            return await self._reply(answer)

        return handler

    def _answering(
        self, model: type[BaseModel], act: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            raw = await read_body(request)

            async def answer() -> object:
                return await act(model() if model is Nothing else model.model_validate_json(raw))

            return await self._reply(answer)

        return handler

    async def _reply(self, answer: Callable[[], Awaitable[Any]]) -> Response:
        try:
            return JSONResponse(await answer())
        except ValidationError as error:
            detail = [
                {"type": e["type"], "loc": ["body", *e["loc"]], "msg": e["msg"]}
                for e in error.errors(include_url=False)
            ]
            return JSONResponse({"detail": detail}, 422)
        except Refused as error:
            self._sessions.metrics.errors.labels(error.reply.kind.value).inc()
            retry = (
                {}
                if error.reply.retry_after_s is None
                else {"Retry-After": str(max(1, round(error.reply.retry_after_s)))}
            )
            status = 200 if self._dialect.polite and error.status != 503 else error.status
            return JSONResponse({"error": error.reply.message}, status, retry)

    def _find(self, number: int) -> Place:
        place = self._places.get(number)
        if place is None:
            raise Refused(ErrorKind.UNKNOWN_SESSION, f"The id {number} is not valid.")
        place.used = time.monotonic()
        return place

    def _begun(self, number: int) -> Place:
        place = self._find(number)
        if not place.session:
            raise Refused(ErrorKind.BAD_REQUEST, "Environment not initialized")
        return place

    async def _open(self, place: Place) -> None:
        assert place.task is not None
        request = CreateRequest(
            request_key=f"agentgym-{place.id}-{secrets.token_hex(8)}", task_id=place.task
        )
        opened = CreateReply.model_validate_json(
            await self._sessions.create(request, self._spec.make)
        )
        place.session, place.observation = opened.session_id, opened.observation
        place.prompt = f"{self._spec.instructions}\n{opened.observation}"
        place.turn, place.reward, place.score, place.done = 0, 0.0, 0.0, False
        if self._dialect.opened is not None:
            place.opening = await self._sessions.inspect(place.session, self._dialect.opened)
            place.observation = place.opening.pop("observation", place.observation)
            place.reward = place.score = place.opening.pop("score", 0.0)

    async def _end(self, place: Place) -> None:
        if place.session:
            await self._sessions.close(place.session)
            place.session = ""

    def _forget(self) -> None:
        """Drop the ids nobody used for as long as a session may be idle; their sessions were
        reaped.
        """
        oldest = time.monotonic() - self._sessions.settings.session_ttl_s
        for place in [
            place
            for place in self._places.values()
            if place.used < oldest and not place.lock.locked()
        ]:
            del self._places[place.id]


def _finished(place: Place) -> Refused:
    return Refused(ErrorKind.SESSION_GONE, f"The task with environment {place.id} has finished.")


def _checked(task: int | None) -> int | None:
    if task is not None and not 0 <= task < MAX_ID:
        raise Refused(
            ErrorKind.BAD_REQUEST, f"data_idx must be at least 0 and below {MAX_ID}, got {task}"
        )
    return task


async def read_body(request: Request) -> bytes:
    """Errors: Refused where it is longer than MAX_BODY_BYTES."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(ErrorKind.BAD_REQUEST, f"body is longer than {MAX_BODY_BYTES} bytes")
    return body
