"""The HTTP side of an environment server: routes, status codes and nothing else. `envs.sessions` decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from envs.env import EnvSpec
from envs.sessions import Refused, ServerSettings, Sessions
from envs.wire import CreateRequest, ErrorKind, ErrorReply, Message, SessionRequest, StepRequest

__all__ = ["ServerSettings", "make_app"]

M = TypeVar("M", bound=Message)
MAX_BODY_BYTES = 256 * 1024


def make_app(spec: EnvSpec, settings: ServerSettings) -> FastAPI:
    """One environment over HTTP. `app.state.sessions` is the `Sessions` behind it; its lifespan reaps, probes and drains.

    Bodies are validated here and not by FastAPI: `step` is called thousands of times a second and every failure must be an `ErrorReply`.
    """
    sessions = Sessions(spec, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sessions.start()
        try:
            yield
        finally:
            await sessions.stop()

    app = FastAPI(title=f"{spec.name} environment", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.sessions = sessions

    async def step(request: Request) -> Response:
        return _json(await sessions.step(await _parse(request, StepRequest)))

    async def create(request: Request) -> Response:
        return _json(await sessions.create(await _parse(request, CreateRequest)))

    async def close(request: Request) -> Response:
        return _message(await sessions.close((await _parse(request, SessionRequest)).session_id))

    async def expert(request: Request) -> Response:
        return _message(await sessions.expert((await _parse(request, SessionRequest)).session_id))

    async def info(_: Request) -> Response:
        return _message(sessions.info())

    async def observation(request: Request) -> Response:
        return _message(sessions.observation(_session_id(request)))

    async def render(request: Request) -> Response:
        return _message(await sessions.render(_session_id(request)))

    async def healthz(_: Request) -> Response:
        return Response("ok", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        return _message(sessions.readiness())

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(sessions.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    posts: list[Callable[[Request], Awaitable[Response]]] = [step, create, close]
    if settings.offer_expert:
        posts.append(expert)
    for handler in posts:
        app.add_route(f"/{handler.__name__}", handler, methods=["POST"])
    for handler in (info, observation, render, healthz, readyz, metrics):
        app.add_route(f"/{handler.__name__}", handler, methods=["GET"])

    def failed(reply: ErrorReply, status: int) -> Response:
        sessions.metrics.errors.labels(reply.kind.value).inc()
        headers = {} if reply.retry_after_s is None else {"Retry-After": str(max(1, round(reply.retry_after_s)))}
        return Response(reply.model_dump_json(), status, headers, "application/json")

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return failed(error.reply, error.status)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return failed(ErrorReply(kind=ErrorKind.BAD_REQUEST, message=message), error.status_code)

    async def broken(_: Request, error: Exception) -> Response:
        return failed(ErrorReply(kind=ErrorKind.ENV_CRASHED, message=f"fault in the server: {type(error).__name__} {error}"), 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, broken)
    return app


async def _parse(request: Request, model: type[M]) -> M:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(ErrorKind.BAD_REQUEST, f"body is longer than {MAX_BODY_BYTES} bytes")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        raise Refused(ErrorKind.BAD_REQUEST, f"{where}: {problem['msg']}") from None


def _session_id(request: Request) -> str:
    session_id = request.query_params.get("session_id", "")
    if not session_id:
        raise Refused(ErrorKind.BAD_REQUEST, "session_id: missing; ask for ?session_id=...")
    return session_id


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _message(message: Message) -> Response:
    return _json(message.model_dump_json().encode())
