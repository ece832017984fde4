"""The HTTP side of an environment server: only routes and status codes. `envs.sessions` does the
work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.compat import AgentGymRoutes, read_body
from envs.dialect import common
from envs.doors import Doors
from envs.env import EnvSpec
from envs.openapi import Route, document
from envs.openenv import PATH, OpenEnv
from envs.refusals import Refused, retry_header
from envs.sessions import ServerSettings, Sessions
from envs.wire import (
    BatchReply,
    BatchRequest,
    CloseReply,
    CreateReply,
    CreateRequest,
    ErrorKind,
    ErrorReply,
    ExpertReply,
    HintsReply,
    InfoReply,
    Message,
    ObservationReply,
    ReadyReply,
    RenderReply,
    SessionRequest,
    StepReply,
    StepRequest,
)

__all__ = ["ServerSettings", "make_app"]

M = TypeVar("M", bound=Message)
Handler = Callable[[Request], Awaitable[Response]]


def make_app(spec: EnvSpec, settings: ServerSettings) -> FastAPI:
    """Return the application that serves one environment over HTTP.

    `app.state.sessions` is its `Sessions`; the app's lifespan starts and stops them.
    Bodies are validated here and not by FastAPI: `step` is called thousands of times a second and
    every failure must be an `ErrorReply`.
    """
    sessions = Sessions(spec, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sessions.start()
        try:
            yield
        finally:
            await sessions.stop()

    app = FastAPI(
        title=f"{spec.name} environment",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.sessions = sessions

    async def step(request: Request) -> Response:
        return _json(await sessions.step(await _parse(request, StepRequest)))

    async def create(request: Request) -> Response:
        return _json(await sessions.create(await _parse(request, CreateRequest)))

    async def answer(item: StepRequest | CreateRequest | SessionRequest) -> bytes:
        try:
            if isinstance(item, StepRequest):
                return await sessions.step(item)
            if isinstance(item, CreateRequest):
                return await sessions.create(item)
            return (await sessions.close(item.session_id)).model_dump_json().encode()
        except Refused as error:
            sessions.metrics.errors.labels(error.reply.kind.value).inc()
            return error.reply.model_dump_json().encode()

    async def batch(request: Request) -> Response:
        replies = [await answer(item) for item in (await _parse(request, BatchRequest)).requests]
        return _json(b'{"replies":[' + b",".join(replies) + b"]}")

    async def info(_: Request) -> Response:
        return _message(sessions.info())

    async def healthz(_: Request) -> Response:
        return Response("ok", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        return _message(sessions.readiness())

    async def metrics(_: Request) -> Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return Response(generate_latest(sessions.metrics.registry), headers=headers)

    async def openapi(_: Request) -> Response:
        return JSONResponse(document(app.title, list(table), bearer=bool(settings.token)))

    text = "text/plain"
    table: dict[Route, Handler] = {
        Route("POST", "/step", StepRequest, StepReply, "act"): step,
        Route("POST", "/create", CreateRequest, CreateReply, "open a session on a task"): create,
        Route("GET", "/info", None, InfoReply, "what this server is"): info,
        Route("GET", "/readyz", None, ReadyReply, "is the scripted episode passed"): readyz,
        Route("GET", "/healthz", summary="is the process alive", media_type=text): healthz,
        Route("GET", "/metrics", summary="Prometheus figures", media_type=text): metrics,
        Route("GET", "/openapi.json", summary="this document"): openapi,
    }

    def of_session(
        method: str, path: str, reply: type[M], summary: str, act: Callable[[str], Awaitable[M]]
    ) -> None:
        """Add a route that calls `act` with the session id of the body or query."""

        async def handler(request: Request) -> Response:
            if method == "GET":
                return _message(await act(_session_id(request)))
            return _message(await act((await _parse(request, SessionRequest)).session_id))

        table[Route(method, path, SessionRequest, reply, summary)] = handler

    of_session("POST", "/close", CloseReply, "close a session", sessions.close)
    of_session(
        "GET", "/observation", ObservationReply, "the last observation", sessions.observation
    )
    of_session("GET", "/render", RenderReply, "a picture of the present state", sessions.render)
    if sessions.takes_batches:
        many = "many of the above at once"
        table[Route("POST", "/batch", BatchRequest, BatchReply, many)] = batch
    if spec.offers_hints:
        possible = "actions the simulator would carry out now"
        of_session("GET", "/hints", HintsReply, possible, sessions.hints)
    if settings.offer_expert:
        of_session("POST", "/expert", ExpertReply, "what an expert would do now", sessions.expert)
    dialect = spec.dialect or common(f"This is environment {spec.name}.")
    for method, path, body, handler in AgentGymRoutes(sessions, dialect).table():
        table[Route(method, path, body, None, "as AgentGym's server", None)] = handler
    openenv = OpenEnv(sessions)
    for path, handler, summary in openenv.table():
        table[Route("GET", path, None, None, summary, None)] = handler
    app.router.add_websocket_route(PATH, openenv.connected)
    for route, handler in table.items():
        app.add_route(route.path, handler, methods=[route.method])

    def failed(reply: ErrorReply, status: int) -> Response:
        sessions.metrics.errors.labels(reply.kind.value).inc()
        return Response(reply.model_dump_json(), status, retry_header(reply), "application/json")

    def refuse(error: Refused) -> Response:
        return failed(error.reply, error.status)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return refuse(error)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return failed(ErrorReply(kind=ErrorKind.BAD_REQUEST, message=message), error.status_code)

    async def broken(_: Request, error: Exception) -> Response:
        message = f"fault in the server: {type(error).__name__} {error}"
        return failed(ErrorReply(kind=ErrorKind.ENV_CRASHED, message=message), 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, broken)
    handlers = {(route.method, route.path): handler for route, handler in table.items()}
    app.add_middleware(Direct, handlers=handlers, refuse=refuse)
    app.add_middleware(Doors, token=settings.token, hosts=settings.hosts, refuse=refuse)
    return app


class Direct:
    """Middleware that calls a request's handler directly: a router that tries one route after the
    other costs more than a fast simulator's step.

    A Refused is answered by `refuse`; a ClientDisconnect is not answered. Other paths and
    exceptions are left to the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: dict[tuple[str, str], Handler],
        refuse: Callable[[Refused], Response],
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = (scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        handler = self._handlers.get(key)
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
        except Refused as error:
            response = self._refuse(error)
        except ClientDisconnect:  # the request did not arrive whole; no client waits for an answer
            return
        await response(scope, receive, send)


async def _parse(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await read_body(request))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        location = ".".join(str(part) for part in problem["loc"]) or "body"
        raise Refused(ErrorKind.BAD_REQUEST, f"{location}: {problem['msg']}") from None


def _session_id(request: Request) -> str:
    session_id = request.query_params.get("session_id", "")
    if not session_id:
        raise Refused(ErrorKind.BAD_REQUEST, "session_id: missing; ask for ?session_id=...")
    return session_id


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _message(message: Message) -> Response:
    return _json(message.model_dump_json().encode())
