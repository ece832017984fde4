"""The sessions of one server: it admits them, lets each request act only once, and closes every
session in the end.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from envs.bounded import run_bounded
from envs.env import EnvSpec, Expert, ExpertFailed, GraderFailed, Simulator, StepResult, UnknownTask
from envs.metrics import Metrics
from envs.refusals import Memory, Refused
from envs.wire import (
    TEXTS,
    CloseReply,
    CreateReply,
    CreateRequest,
    ErrorKind,
    ExpertReply,
    HintsReply,
    InfoReply,
    ObservationReply,
    ReadyReply,
    RenderReply,
    StepReply,
    StepRequest,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

POOL_THREADS = 16
CALL_TIMEOUT_S = 120.0  # of one call to a blocking simulator
CLOSE_S = 4.0  # at shutdown, for closing the remaining simulators
EXPERT_THREADS = 4


@dataclass(frozen=True, slots=True)
class ServerSettings:
    max_sessions: int = 256
    session_ttl_s: float = 300.0  # an idle session is closed after this
    drain_timeout_s: float = 20.0  # open sessions get this long once the server was asked to stop
    offer_expert: bool = False
    expert_timeout_s: float = 5.0
    token: str = ""  # required of every request but probes and metrics; empty: no token needed
    hosts: tuple[str, ...] = ()  # names of the server in addition to localhost and its address


@dataclass(slots=True)
class Session:
    id: str
    request_key: str
    task_id: int
    simulator: Simulator
    created: bytes  # the reply to create
    observation: str
    last_used: float
    turn: int = 0
    reply: bytes = b""  # to the last step
    ended: bool = False
    closed: bool = False
    expert: Expert | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The sessions of one server. All methods run on one event loop; the server's lifespan calls
    `start` and `stop`.

    A simulator is foreign code and may raise anything: `except Exception` is used around calls to
    simulators only, and such an exception ends only that session.
    """

    def __init__(self, spec: EnvSpec, settings: ServerSettings) -> None:
        self.spec = spec
        self.settings = settings
        self.metrics = Metrics(spec.gauges, lambda: len(self._by_id))
        self.draining = False
        self.ready = False
        self.failure = ""  # of the scripted episode
        self._instance = secrets.token_urlsafe(16)
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, asyncio.Task[Session]] = {}  # also those still being opened
        self._gone_ids = Memory()
        self._gone_keys = Memory()
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="simulator")
        self._expert_slots = asyncio.Semaphore(EXPERT_THREADS)
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_until = 0.0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._reap()), asyncio.create_task(self._probe())]

    async def drain(self) -> None:
        """Refuse new sessions and wait until the open ones are closed, at most drain_timeout_s
        after the first call.
        """
        if not self.draining:
            self.draining = True
            self._drain_until = time.monotonic() + self.settings.drain_timeout_s
            logger.info("draining: %d sessions open", len(self._by_key))
        # polled, because it runs once per process; an event would have to be set at every close
        while self._by_key and time.monotonic() < self._drain_until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def abandon(self) -> None:
        """Refuse new sessions and make `drain` return at once: the owners are gone or do not wait.
        May be called from any thread.
        """
        self._drain_until = 0.0
        self.draining = True

    async def stop(self) -> None:
        await self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = [asyncio.create_task(self._close(session)) for session in list(self._by_id.values())]
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        if self.spec.close is not None:
            try:
                await self._in_pool(self.spec.close)
            except Exception:
                logger.exception("the simulators' shared resources could not be closed")
        self._pool.shutdown(wait=False, cancel_futures=True)

    def info(self) -> InfoReply:
        return InfoReply(
            env=self.spec.name,
            options=self.spec.options,
            instructions=self.spec.instructions,
            examples=self.spec.examples(),
            offers_expert=self.settings.offer_expert,
            offers_render=True,
            takes_batches=self.takes_batches,
            max_sessions=self.settings.max_sessions,
            active_sessions=len(self._by_id),
            session_ttl_s=self.settings.session_ttl_s,
            instance=self._instance,
            pid=os.getpid(),
        )

    @property
    def takes_batches(self) -> bool:
        """True if steps are fast: a batch is answered one request after the other, on the event
        loop.
        """
        return not (self.spec.blocking or self.spec.awaited)

    def readiness(self) -> ReadyReply:
        if self.draining:
            raise Refused(ErrorKind.DRAINING, "the server is shutting down")
        if self.failure:
            failed = f"the scripted episode failed: {self.failure}"
            raise Refused(ErrorKind.ENV_CRASHED, failed, status=503)
        if not self.ready:
            raise Refused(ErrorKind.NOT_READY, "the scripted episode has not passed yet")
        return ReadyReply(
            ready=True, active_sessions=len(self._by_id), max_sessions=self.settings.max_sessions
        )

    async def create(
        self, request: CreateRequest, make: Callable[[], Simulator] | None = None
    ) -> bytes:
        """Open a session and return the reply to its creation. Errors: Refused.

        The same key gives the same session, also to two requests at the same time.
        make: makes the simulator; None means the served one.
        """
        if request.request_key in self._gone_keys:
            gone = "the session of this request key was closed; use a new key"
            raise Refused(ErrorKind.SESSION_GONE, gone)
        opening = self._by_key.get(request.request_key)
        if opening is None:
            self._admit()
            opening = asyncio.create_task(self._open(request, make or self.spec.make))
            self._by_key[request.request_key] = opening
        session = await asyncio.shield(opening)
        if session.task_id != request.task_id:
            used = f"request key was used for task {session.task_id}, not {request.task_id}"
            raise Refused(ErrorKind.BAD_REQUEST, f"{used}; use a new key")
        session.last_used = time.monotonic()
        return session.created

    async def step(self, request: StepRequest) -> bytes:
        session = self._find(request.session_id)
        async with session.lock:
            self._check_open(session)
            if request.turn == session.turn:
                return session.reply
            if request.turn != session.turn + 1:
                problem = f"turn {request.turn} cannot follow turn {session.turn}"
                turn = session.turn + 1
                raise Refused(ErrorKind.TURN_MISMATCH, problem, expected_turn=turn)
            self._check_running(session)
            started = time.perf_counter()
            try:
                result = await self._act(session.simulator, request.action)
                reply = StepReply(
                    turn=request.turn,
                    observation=result.observation,
                    reward=result.reward,
                    terminated=result.terminated,
                    truncated=result.truncated,
                    success=result.success,
                    info=result.info,
                )
                session.reply = reply.model_dump_json().encode()
            except Exception as error:
                await self._crash(session, error)
            session.turn = request.turn
            session.observation = result.observation
            session.ended = result.terminated or result.truncated
            session.last_used = time.monotonic()
            self.metrics.steps.inc()
            self.metrics.step_seconds.observe(time.perf_counter() - started)
            return session.reply

    async def observation(self, session_id: str) -> ObservationReply:
        session = self._find(session_id)
        return ObservationReply(turn=session.turn, observation=session.observation)

    async def inspect(self, session_id: str, look: Callable[[Any], T]) -> T:
        """Return `look(simulator)`, called between two turns. If that raises, close the session.

        Errors: Refused, also in that case.
        """
        session = self._find(session_id)
        async with session.lock:
            self._check_open(session)
            try:
                return await self._in_pool(lambda: look(session.simulator))
            except Exception as error:
                await self._crash(session, error)

    async def render(self, session_id: str) -> RenderReply:
        media_type, data = await self.inspect(session_id, lambda simulator: simulator.render())
        text = data.decode() if media_type in TEXTS else base64.b64encode(data).decode()
        return RenderReply(media_type=media_type, data=text)

    async def hints(self, session_id: str) -> HintsReply:
        actions = await self.inspect(session_id, lambda simulator: simulator.hints())
        return HintsReply(actions=actions)

    async def expert(self, session_id: str) -> ExpertReply:
        session = self._find(session_id)
        async with session.lock:
            self._check_open(session)
            self._check_running(session)
            limit_s = self.settings.expert_timeout_s

            def ask() -> str:
                session.expert = session.expert or session.simulator.expert()
                return session.expert.next_action()

            try:
                async with self._expert_slots:
                    action = await run_bounded(ask, limit_s)
            except (ExpertFailed, TimeoutError) as error:
                session.expert = None  # it may have been stopped in the middle of its plan
                reason = str(error) or f"no answer within {limit_s:g} s"
                where = f"(task {session.task_id}, turn {session.turn})"
                raise Refused(ErrorKind.EXPERT_FAILED, f"{reason} {where}") from error
            except Exception as error:
                await self._crash(session, error)
            session.last_used = time.monotonic()
            return ExpertReply(action=action)

    async def close(self, session_id: str) -> CloseReply:
        session = self._by_id.get(session_id)
        if session is None:
            return CloseReply(closed=False)
        async with session.lock:
            if session.closed:
                return CloseReply(closed=False)
            await self._close(session)
        return CloseReply(closed=True)

    def _admit(self) -> None:
        if self.draining:
            self.metrics.rejected.inc()
            raise Refused(ErrorKind.DRAINING, "the server is shutting down")
        if len(self._by_key) >= self.settings.max_sessions:
            self.metrics.rejected.inc()
            raise Refused(ErrorKind.FULL, f"all {self.settings.max_sessions} sessions are taken")

    async def _open(self, request: CreateRequest, make: Callable[[], Simulator]) -> Session:
        simulator: Simulator | None = None

        def build() -> str:
            nonlocal simulator
            simulator = make()
            return simulator.reset(request.task_id)

        try:
            observation = await self._call(build)
        except Exception as error:
            del self._by_key[request.request_key]
            await self._close_simulator(simulator)
            if isinstance(error, UnknownTask):
                raise Refused(ErrorKind.BAD_REQUEST, str(error)) from error
            logger.exception("task %d could not be opened", request.task_id)
            problem = f"task {request.task_id} could not be opened: {type(error).__name__} {error}"
            raise Refused(ErrorKind.ENV_CRASHED, problem) from error
        assert simulator is not None
        id, ttl_s = secrets.token_urlsafe(24), self.settings.session_ttl_s
        reply = CreateReply(session_id=id, observation=observation, session_ttl_s=ttl_s)
        session = Session(
            id=id,
            request_key=request.request_key,
            task_id=request.task_id,
            simulator=simulator,
            created=reply.model_dump_json().encode(),
            observation=observation,
            last_used=time.monotonic(),
        )
        self._by_id[id] = session
        self.metrics.created.inc()
        return session

    def _find(self, session_id: str) -> Session:
        session = self._by_id.get(session_id)
        if session is None:
            if session_id in self._gone_ids:
                raise Refused(ErrorKind.SESSION_GONE, "the session was closed")
            raise Refused(ErrorKind.UNKNOWN_SESSION, "there is no such session")
        session.last_used = time.monotonic()
        return session

    def _check_open(self, session: Session) -> None:
        """Raise Refused if the session was closed while its lock was awaited."""
        if session.closed:
            raise Refused(ErrorKind.SESSION_GONE, "the session was closed")

    def _check_running(self, session: Session) -> None:
        if session.ended:
            raise Refused(ErrorKind.SESSION_GONE, f"the episode ended at turn {session.turn}")

    async def _crash(self, session: Session, error: Exception) -> NoReturn:
        logger.error("task %d crashed after turn %d", session.task_id, session.turn, exc_info=error)
        await self._close(session)
        reason = f"{type(error).__name__} {error}".strip()
        kind = ErrorKind.GRADER_FAILED if isinstance(error, GraderFailed) else ErrorKind.ENV_CRASHED
        where = f"task {session.task_id}, after turn {session.turn}"
        raise Refused(kind, f"{where}: {reason}") from error

    async def _close(self, session: Session) -> None:
        session.closed = True
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.request_key, None)
        self._gone_ids.add(session.id)
        self._gone_keys.add(session.request_key)
        await self._close_simulator(session.simulator)

    async def _close_simulator(self, simulator: Simulator | None) -> None:
        if simulator is None:
            return
        try:
            await self._call(simulator.close)
        except Exception:  # the session ends in any case
            logger.exception("a simulator could not be closed")

    async def _act(self, simulator: Any, action: str) -> StepResult:
        if self.spec.awaited:
            result: StepResult = await simulator.step_async(action)
            return result
        return await self._call(lambda: simulator.step(action))

    async def _call(self, work: Callable[[], T]) -> T:
        """Return `work()`, a call to a simulator. Blocking ones run in the pool, with TimeoutError
        after CALL_TIMEOUT_S. For fast ones a thread would cost more than the call.
        """
        return await self._in_pool(work) if self.spec.blocking else work()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.wait_for(
            asyncio.get_running_loop().run_in_executor(self._pool, work), CALL_TIMEOUT_S
        )

    async def _reap(self) -> None:
        """Close sessions unused for session_ttl_s, except during a call. Run until cancelled."""
        ttl_s = self.settings.session_ttl_s
        while True:
            await asyncio.sleep(min(ttl_s / 4, 5.0))
            now = time.monotonic()
            idle = [s for s in self._by_id.values() if now - s.last_used > ttl_s]
            for session in [s for s in idle if not s.lock.locked()]:
                async with session.lock:
                    if not session.closed and time.monotonic() - session.last_used > ttl_s:
                        await self._close(session)
                        self.metrics.reaped.inc()
                        message = "closed a session idle for more than %g s (task %d, turn %d)"
                        logger.info(message, ttl_s, session.task_id, session.turn)

    async def _probe(self) -> None:
        """Warm up, play the scripted episode, set `ready`. Log an exception and set `failure`."""
        simulator: Simulator | None = None

        def prepare() -> None:
            nonlocal simulator
            simulator = self.spec.make()
            simulator.reset(self.spec.probe_task)

        try:
            if self.spec.warm is not None:
                warm, max_sessions = self.spec.warm, self.settings.max_sessions
                await self._in_pool(lambda: warm(max_sessions))
            await self._call(prepare)
            assert simulator is not None
            for action in self.spec.probe_actions:
                await self._call(partial(simulator.step, action))
            self.ready = True
        except Exception as error:
            self.failure = f"{type(error).__name__} {error}".strip()
            logger.exception("the scripted episode on task %d failed", self.spec.probe_task)
        finally:
            await self._close_simulator(simulator)
