"""AgentGym's own routes under `/agentgym`, so that its clients work unchanged against this server.

Shapes and error style are theirs (errors are status 200 with `{"error": text}` where their server
does so); sessions, limits and the reaper are ours.
Ids are unguessable integers below 2**53.
On purpose not theirs: an episode that ended pays nothing more, and `close` of an unknown id is
`false` everywhere.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from envs.sessions import TEXTS, Refused, Sessions
from envs.wire import (
    MAX_ACTION_CHARS,
    CreateReply,
    CreateRequest,
    ErrorKind,
    StepReply,
    StepRequest,
)

Json = dict[str, Any]
MAX_ID = 2**53
MAX_BODY_BYTES = 256 * 1024


class Reset(BaseModel):
    """Further fields are ignored, as AgentGym's servers do."""

    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))
    data_idx: int = 0


class SearchReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    # None: the one given to create
    data_idx: int | None = Field(default=None, validation_alias="id")


class WebArenaReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    seed: int = 0  # asked for and not used, as there
    data_idx: int = Field(validation_alias="idx")


class Step(BaseModel):
    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))
    action: str = Field(max_length=MAX_ACTION_CHARS)


class Named(BaseModel):
    id: int = Field(validation_alias=AliasChoices("id", "env_idx"))


class TextCraftCreate(BaseModel):
    """A body is required; what it says about recipes is overruled by the reset that follows."""

    commands: str | None = None
    goal: str | None = None


class SearchCreate(BaseModel):
    id: int


class Nothing(BaseModel):
    """No body is expected."""


@dataclass(slots=True)
class Place:
    """One of AgentGym's environments: an id, and since its reset a session."""

    id: int
    task: int | None  # index of the item, once it is known
    used: float
    session: str = ""  # our session id
    turn: int = 0
    observation: str = ""
    prompt: str = ""  # task manual and first observation
    reward: float = 0.0  # of the last turn
    score: float = 0.0  # sum of the rewards
    done: bool = False
    opening: Json = field(default_factory=dict)  # what the simulator tells of its task
    truncated: bool = False
    info: Json = field(default_factory=dict)  # of the last turn
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Dialect:
    """What differs between AgentGym's servers."""

    greeting: str
    create: type[BaseModel]
    reset: type[BaseModel]
    created: Callable[[Place], Any]
    shown: Callable[[Place], Any]  # after reset, and to GET /observation
    stepped: Callable[[Place], Json]
    looked: Callable[[Place], Any] | None = None  # to GET /observation, where that is not `shown`
    detailed: Callable[[Place], Json] | None = None  # to GET /detail, where that needs no simulator
    counts: bool = False  # create begins an episode, of an index the server counts itself
    polite: bool = True  # errors have status 200
    # simulator -> what else `shown` tells; maybe another first observation, and a score
    opened: Callable[[Any], Json] | None = None
    # GET route -> what it shows while an episode runs
    views: Mapping[str, Callable[[Any, Place], Any]] = field(default_factory=dict)
    # POST /step_visual: simulator, answer to a step -> answer
    visual: Callable[[Any, Json], Json] | None = None
    closed: Callable[[bool], Any] = bool
    reset_failed: Json | None = None  # answered where a task cannot be opened
    # answered where a step crashes, from the error's text
    step_failed: Callable[[str], Json] | None = None


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _sciworld_detail(place: Place) -> Json:
    shown = {"reward": place.reward, "score": place.score}
    return {
        **place.opening,
        "observation": place.observation,
        **{k: _whole(v) for k, v in shown.items()},
        "deleted": False,
        "done": place.done,
    }


def _sciworld_state(simulator: Any, place: Place) -> Json:
    look, inventory, goals, actions, objects = simulator.ask(
        "freeActionLook",
        "freeActionInventory",
        "getGoalProgressStr",
        "getPossibleActions",
        "getPossibleObjects",
    )
    return {
        "observation": look,
        "inventory": inventory,
        "task_description": simulator.description,
        "goal_progress": goals,
        "possible_actions": actions.splitlines()[:10],
        "possible_objects": objects.splitlines()[:10],
        "current_moves": simulator.moves,
        "environment_info": _sciworld_detail(place),
    }


def _sciworld_hint(simulator: Any, _: Place) -> Json:
    actions, objects = simulator.ask("getPossibleActions", "getPossibleObjects")
    return {"possible_actions": actions.splitlines(), "possible_objects": objects.splitlines()}


def _sciworld_visual(simulator: Any, answer: Json) -> Json:
    look, inventory = simulator.ask("freeActionLook", "freeActionInventory")
    info = {
        "moves": simulator.moves,
        "score": answer["score"],
        "reward": answer["reward"],
        "look": look,
        "inv": inventory,
        "taskDesc": simulator.description,
        "valid": simulator.hints(),
        "variationIdx": simulator.task.variation,
        "taskName": simulator.task.name,
        "simplificationStr": "",
    }
    return {
        **answer,
        "info": info,
        "object_tree": simulator.tree(),
        "inventory": inventory,
        "moves": simulator.moves,
    }


DIALECTS = {
    "textcraft": Dialect(
        greeting="This is environment TextCraft.",
        create=TextCraftCreate,
        reset=Reset,
        created=lambda place: {
            "id": place.id,
            "observation": place.observation,
            "done": False,
            "reward": 0,
        },
        shown=lambda place: {
            "id": place.id,
            "observation": place.observation,
            "done": place.done,
            "reward": _whole(place.reward),
        },
        stepped=lambda place: {
            "observation": place.observation,
            "reward": _whole(place.reward),
            "done": place.done,
        },
        looked=lambda place: place.observation,
        detailed=lambda place: {
            "observation": place.observation,
            "done": place.done,
            "reward": _whole(place.reward),
            "deleted": False,
        },
        counts=True,
    ),
    "babyai": Dialect(
        greeting="This is environment BabyAI.",
        create=Nothing,
        reset=Reset,
        created=lambda place: {"id": place.id},
        shown=lambda place: {
            "observation": place.observation,
            "reward": place.reward,
            "score": place.score,
            "deleted": False,
            "done": place.done,
        },
        stepped=lambda place: {
            "observation": place.observation,
            "reward": place.reward,
            "score": place.score,
            "done": place.done,
        },
    ),
    "searchqa": Dialect(
        greeting="ok",
        create=SearchCreate,
        reset=SearchReset,
        created=lambda place: place.id,
        shown=lambda place: place.prompt,
        stepped=lambda place: {
            "observation": place.observation,
            "reward": place.reward,
            "done": place.done,
            "info": None,
        },
        polite=False,
    ),
    "sciworld": Dialect(
        greeting="This is environment ScienceWorld.",
        create=Nothing,
        reset=Reset,
        created=lambda place: {"id": place.id},
        shown=_sciworld_detail,
        looked=lambda place: place.observation,
        stepped=lambda place: {
            "observation": place.observation,
            "reward": _whole(place.reward),
            "score": _whole(place.score),
            "done": place.done,
        },
        opened=lambda simulator: {
            "task_name": simulator.task.name,
            "var_num": simulator.task.variation,
            "task_description": simulator.description,
            "observation": simulator.room,
            "score": float(simulator.score),
        },
        views={
            "detail": lambda _, place: _sciworld_detail(place),
            "task_description": lambda simulator, _: {"task_description": simulator.description},
            "goals": lambda simulator, _: {"goals": simulator.ask("getGoalProgressStr")[0]},
            "object_tree": lambda simulator, _: {"object_tree": simulator.tree()},
            "action_hint": _sciworld_hint,
            "state": _sciworld_state,
        },
        visual=_sciworld_visual,
    ),
    "webarena": Dialect(
        greeting="ok",
        create=Nothing,
        reset=WebArenaReset,
        created=lambda place: {"env_idx": place.id},
        shown=lambda place: {"observation": place.observation, **place.opening},
        stepped=lambda place: {
            "observation": place.observation,
            "reward": place.reward,
            "terminated": place.done and not place.truncated,
            "truncated": place.truncated,
            "info": place.info,
        },
        polite=False,
        looked=lambda place: place.observation,
        opened=lambda simulator: dict(simulator.about),
        closed=lambda closed: {"closed": "closed" if closed else "no such environment"},
        reset_failed={"observation": "TimeoutError", "sites": "Error", "object": "Error"},
        step_failed=lambda text: {
            "observation": text,
            "reward": 0,
            "terminated": False,
            "truncated": False,
            "info": {},
        },
    ),
}


class AgentGymRoutes:
    """The routes of one server, over the sessions it has anyway."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._dialect = DIALECTS[sessions.spec.name]
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

    async def _create(self, body: BaseModel) -> Any:
        self._forget()
        if len(self._places) >= self._sessions.settings.max_sessions:
            raise Refused(
                ErrorKind.FULL, f"all {self._sessions.settings.max_sessions} environments are taken"
            )
        task = (
            body.id
            if isinstance(body, SearchCreate)
            else next(self._counter)
            if self._dialect.counts
            else None
        )
        place = Place(1 + secrets.randbelow(MAX_ID - 1), _checked(task), time.monotonic())
        if self._dialect.counts:
            await self._open(place)
        self._places[place.id] = place
        return self._dialect.created(place)

    async def _reset(self, body: Any) -> Any:
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

    async def _step(self, body: Any) -> Any:
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

    async def _close(self, body: Any) -> Any:
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

    async def _step_visual(self, body: Any) -> Any:
        answer = await self._step(body)
        place, visual = self._find(body.id), self._dialect.visual
        assert visual is not None
        return await self._sessions.inspect(
            place.session, lambda simulator: visual(simulator, answer)
        )

    def _showing(self, show: Callable[[Place], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            async def answer() -> Any:
                return show(self._begun(Named.model_validate(dict(request.query_params)).id))

            return await self._reply(answer)

        return handler

    def _viewing(
        self, view: Callable[[Any, Place], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            async def answer() -> Any:
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

            async def answer() -> Any:
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
