"""A client of the environment servers of the project AgentGym; its sessions are `OpenSession`s.

The client does not emulate features that their protocol lacks:
A step has no number, so a lost reply ends the attempt, and the episode is played again in a new
session.
The servers report no load and offer neither an expert nor instructions.
A session that is never closed stays open forever.
Their `done` is one flag for the end of the task and for the simulator's own step limit, so an
episode cut by that limit counts as terminated here; only WebArena's server reports `truncated`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from agentgym.config import ConfigError, EnvConfig
from agentgym.rollouts.env_client import CLOSE_TIMEOUT_S, EnvError, sendable
from agentgym.rollouts.episode import Guide
from agentgym.rollouts.foreign import (
    ForeignPool,
    flag_of,
    number_of,
    text_of,
    unexpected,
    unreachable,
)
from agentgym.types import Item
from envs.plain import whole
from envs.wire import StepReply

logger = logging.getLogger(__name__)

BACKOFF_S = 0.1
OK = "ok"  # greeting of the servers that do not identify themselves
BROWSER_CLOSE_S = 40.0  # WebArena's server gives a browser 30 s to end


@dataclass(frozen=True)
class Shape:
    """Requests, answer keys and scoring rules of AgentGym's server for one environment."""

    greeting: str  # the answer to `GET /`; if it is a name, the answer need only contain it
    create: Callable[[int], Any] = lambda _: None  # task -> body
    # id, task -> body
    reset: Callable[[int, int], dict[str, Any]] = lambda number, task: {
        "id": number,
        "data_idx": task,
    }
    names_id: str = "id"  # key of the environment's id in step and close
    reward: str = "reward"  # key of the reward in a step's answer
    is_total: bool = False  # the reported reward is the sum so far
    # for part credit: the total of a solved task; a negative total is a failure
    full: float = 0.0
    describes: bool = False  # the reset returns a task description with the observation
    # the reset does not return the first observation: a separate request fetches it
    observes: bool = False
    close_timeout_s: float = CLOSE_TIMEOUT_S
    names_created: str = "id"  # key of the environment's id in the answer to create
    # flags in a step's answer: the task is over and, if reported, the simulator's limit is reached
    ends: tuple[str, ...] = ("done",)
    pays_at_end: bool = False  # a reward counts only in the last step


SHAPES = {
    "textcraft": Shape("TextCraft", create=lambda _: {}),
    "babyai": Shape("BabyAI", reward="score", is_total=True),
    "sciworld": Shape("ScienceWorld", reward="score", is_total=True, full=100.0, describes=True),
    "searchqa": Shape(
        OK,
        create=lambda task: {"id": task},
        reset=lambda number, task: {"env_idx": number, "id": task},
        names_id="env_idx",
    ),
    "webarena": Shape(
        OK,
        reset=lambda number, task: {"env_idx": number, "seed": 0, "idx": task},
        names_id="env_idx",
        names_created="env_idx",
        ends=("terminated", "truncated"),
        pays_at_end=True,
        observes=True,
        close_timeout_s=BROWSER_CLOSE_S,
    ),
}


class AgentGymSession:
    """One open episode on a server. One coroutine at a time may use it."""

    def __init__(self, pool: AgentGymPool, endpoint: str, number: int, observation: str) -> None:
        self.endpoint, self.number, self._pool = endpoint, number, pool
        self.observation = observation  # the latest
        self.turn, self._total = 0, 0.0

    async def step(self, action: str) -> StepReply:
        """Send one action, only once, and return the answer; update `turn` and `observation`.
        action: cut by `sendable`. Errors: EnvError.
        Without part credit a positive reward counts as success and end of the episode: AgentGym's
        servers would continue and pay it again.
        Part credit (`Shape.full`) is scaled to 0..1, a failure to 0.
        """
        shape = self._pool.shape
        body = {shape.names_id: self.number, "action": sendable(action)}
        answer = await self._pool.ask(self.endpoint, "/step", body)
        try:
            observation = text_of(answer["observation"])
            figure = number_of(answer[shape.reward])
            terminated, *truncated = (flag_of(answer[name]) for name in shape.ends)
            done = terminated or any(truncated)
        except (KeyError, TypeError, ValueError) as error:
            raise unexpected(self.endpoint, "/step", answer) from error
        total = figure if shape.is_total else self._total + figure
        if shape.full:
            total = max(total, 0.0) / shape.full
        if shape.pays_at_end and not done:
            total = self._total
        reward, self._total = total - self._total, total
        self.turn += 1
        self.observation = observation
        success = total >= 1.0 if shape.full else reward > 0
        terminated = terminated or (success and not shape.full)
        return StepReply(
            turn=self.turn,
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=done and not terminated,
            success=success,
        )

    async def close(self) -> None:
        """Close the session (best effort, tried once); a failure is only logged."""
        shape = self._pool.shape
        body, limit_s = {shape.names_id: self.number}, shape.close_timeout_s
        try:
            await self._pool.ask(self.endpoint, "/close", body, texts=True, timeout_s=limit_s)
        except EnvError as error:
            logger.warning("a session stays open on a server that has no reaper: %s", error)


class AgentGymPool(ForeignPool):
    """AgentGym's servers of one environment. Use as `async with`."""

    def __init__(
        self, env: str, endpoints: Sequence[str], *, request_timeout_s: float, max_retries: int = 4
    ) -> None:
        """Prepare a pool; no request is sent yet. env: name of the environment.
        Errors: ConfigError if SHAPES does not have it.
        """
        if env not in SHAPES:
            raise ConfigError(
                f"env.dialect agentgym is known for {', '.join(sorted(SHAPES))}, not for {env!r};"
                " use native servers"
            )
        self.shape = SHAPES[env]
        super().__init__(endpoints, max_retries=max_retries)
        self._env = env
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide:
        """Check that servers answer `GET /` as this environment's do. Those of SearchQA and
        WebArena answer alike, so the check cannot distinguish these two.
        Result: an empty guide, because these servers have none. `allow_expert` has no effect.
        Errors: EnvError; ValueError naming the endpoint.
        """
        for endpoint in self.endpoints:
            greeting = str(await self._asked(endpoint, "/", None, texts=True))
            expected = self.shape.greeting
            if greeting.strip() != expected and (expected == OK or expected not in greeting):
                raise ValueError(
                    f"{endpoint} answers {greeting[:80]!r}, which no AgentGym server of {env.name}"
                    " does; correct env.endpoints"
                )
        return Guide()

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> AsyncIterator[AgentGymSession]:
        """Yield an open session on the item; close it after the block. Errors: EnvError.
        `request_key` has no effect: this protocol has no such key.
        """
        endpoint = self._less_used()
        created = await self._asked(endpoint, "/create", self.shape.create(item.task_id), post=True)
        number = created.get(self.shape.names_created) if isinstance(created, dict) else created
        if not isinstance(number, int) or isinstance(number, bool):
            raise unexpected(endpoint, "/create", created)
        session = AgentGymSession(self, endpoint, number, "")
        with self._counted(endpoint):
            try:
                session.observation = await self._first_look(endpoint, number, item.task_id)
                yield session
            finally:
                await session.close()

    async def _first_look(self, endpoint: str, number: int, task_id: int) -> str:
        shape = self.shape
        reset = await self._asked(endpoint, "/reset", shape.reset(number, task_id))
        answer = reset if isinstance(reset, dict) else {"observation": reset}
        lacks = shape.describes and "task_description" not in answer
        observation = answer.get("observation")
        if not isinstance(observation, str) or lacks or answer.get("sites") == "Error":
            raise unexpected(endpoint, "/reset", reset)
        if shape.observes:
            route = f"/observation?{shape.names_id}={number}"
            observation = await self._asked(endpoint, route, None, texts=True)
            if not isinstance(observation, str):
                raise unexpected(endpoint, "/observation", observation)
        if shape.describes:
            observation = f"{answer['task_description']}\n{observation}"
        return whole(observation)

    async def ask(
        self,
        endpoint: str,
        route: str,
        body: Any,
        *,
        post: bool = True,
        texts: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request once and return its answer, parsed from JSON.
        body: a value for JSON; None: nothing is sent. post: False for a GET.
        texts: return an answer that is not JSON as text. timeout_s: None for the pool's.
        Errors: EnvError; kind `unreachable` if the request may or may not have been carried out.
        """
        assert self._http is not None, "use the pool as `async with AgentGymPool(...)`"
        method = "POST" if post else "GET"
        try:
            async with self._http.request(
                method,
                endpoint + route,
                data=None if body is None else json.dumps(body),
                headers=self._headers[endpoint],
                allow_redirects=False,
                timeout=self._timeout if timeout_s is None else aiohttp.ClientTimeout(timeout_s),
            ) as response:
                content, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(endpoint, route, error) from error
        if status == 503:
            raise EnvError(endpoint, route, "", "full", content[:200].decode(errors="replace"))
        try:
            answer = json.loads(content)
        except ValueError as error:
            text = content.decode(errors="replace")
            if not texts or status != 200:
                raise EnvError(
                    endpoint, route, "", "protocol", f"status {status}, {text[:200]!r}"
                ) from error
            return text
        if status != 200 or (isinstance(answer, dict) and "error" in answer):
            raise EnvError(
                endpoint, route, "", "env_crashed", f"status {status}: {json.dumps(answer)[:300]}"
            )
        return answer

    async def _asked(
        self, endpoint: str, route: str, body: Any, *, post: bool = False, texts: bool = False
    ) -> Any:
        """Send a request that opens, resets or reads; return its answer. Repeat it if the server is
        full or unreachable. If that opens a session twice, the first is abandoned, never acted in.
        A request with a body is a POST; for the arguments and errors see `ask`.
        """
        post = post or body is not None
        return await self._repeated(
            lambda: self.ask(endpoint, route, body, post=post, texts=texts), first_s=BACKOFF_S
        )
