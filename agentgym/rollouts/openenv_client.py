"""A client of OpenEnv's servers: one WebSocket for each episode, used as an `OpenSession`.

The task's id is the `seed` of the reset, so the server defines the task of each item.
The policy's text goes into the text field of the server's actions, and the policy reads the text
field of the observations; `/schema` names these fields.
The client does not emulate features that OpenEnv lacks. A step has no number, so a lost reply ends
the attempt at the episode. Servers report no load, no options and no reliable instructions.
A step's metadata may contain `success` and `truncated`. Without `success`, an episode succeeds if
it ends, is not truncated, and its rewards have a positive sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from agentgym.config import EnvConfig
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
from envs.wire import StepReply

logger = logging.getLogger(__name__)
_handshakes = logging.getLogger(f"{__name__}.handshakes")
# below that level the library logs headers, including the token
_handshakes.setLevel(logging.WARNING)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# every other code means that the environment failed
KINDS = {"CAPACITY_REACHED": "full", "VALIDATION_ERROR": "bad_request"}
COMMON = ("message", "text")  # preferred names if there are several text fields


@dataclass(frozen=True)
class Fields:
    """The names of the text fields in a server's actions and observations."""

    action: str
    observation: str


class _Direct(connect):
    """A connection that follows no redirect: the token and the policy's text are for the
    configured servers.
    """

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class OpenEnvSession:
    """One open episode, begun by `reset`. One coroutine at a time may use it."""

    def __init__(
        self, endpoint: str, fields: Fields, socket: ClientConnection, timeout_s: float
    ) -> None:
        self.endpoint, self._fields = endpoint, fields
        self._socket, self._timeout_s = socket, timeout_s
        self.observation = ""  # the latest
        self.turn, self._total = 0, 0.0

    async def reset(self, task_id: int, episode_id: str) -> None:
        """Start a task's episode and set `observation` to its first one. Errors: EnvError.
        episode_id: a name of the episode, for the server.
        """
        data = await self._ask("reset", {"seed": task_id, "episode_id": episode_id})
        self.observation = self._text(data)

    async def step(self, action: str) -> StepReply:
        """Send one action, only once, and return the answer; update `turn` and `observation`.
        Without the server's own `success`, an end with a positive sum of rewards is a success.
        action: cut by `sendable`. Errors: EnvError.
        """
        data = await self._ask("step", {self._fields.action: sendable(action)})
        observation = self._text(data)
        metadata = data.get("metadata") or data["observation"].get("metadata") or {}
        try:
            reward, done = number_of(data.get("reward") or 0.0), flag_of(data["done"])
            flags = {
                name: metadata[name]
                for name in ("success", "truncated")
                if isinstance(metadata.get(name), bool)
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unexpected("step", data) from error
        self._total += reward
        self.turn += 1
        self.observation = observation
        truncated = done and flags.get("truncated", False)
        return StepReply(
            turn=self.turn,
            observation=observation,
            reward=reward,
            terminated=done and not truncated,
            truncated=truncated,
            success=flags.get("success", done and not truncated and self._total > 0),
        )

    async def close(self) -> None:
        """Close the session; wait up to CLOSE_TIMEOUT_S until the server has released its slot and
        ends the connection. Errors are suppressed; the connection is closed in any case.
        """
        with contextlib.suppress(WebSocketException, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.send('{"type": "close"}')
                await self._socket.wait_closed()
        self._socket.transport.abort()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer. kind: reset or step.
        Errors: EnvError; the session cannot be used after one.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                # a full server sends an error and closes: `recv` below reads the error
                with contextlib.suppress(WebSocketException):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                raw = await self._socket.recv()
        except (WebSocketException, OSError, TimeoutError) as error:
            raise unreachable(self.endpoint, f"/ws {kind}", error) from error
        try:
            answer = json.loads(raw)
            payload = answer["data"]
            if answer["type"] == "error":
                code = str(payload.get("code", ""))[:40]
                failure = KINDS.get(code, "env_crashed")
                message = f"{code}: {str(payload.get('message'))[:300]}"
                raise EnvError(self.endpoint, f"/ws {kind}", "", failure, message)
            if answer["type"] != "observation" or not isinstance(payload, dict):
                raise self._unexpected(kind, answer)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise self._unexpected(kind, str(raw)) from error
        return payload

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        text = observation.get(self._fields.observation) if isinstance(observation, dict) else None
        try:
            return text_of(text)
        except TypeError as error:
            raise self._unexpected("", data) from error

    def _unexpected(self, kind: str, answer: Any) -> EnvError:
        return unexpected(self.endpoint, f"/ws {kind}".rstrip(), answer)


class OpenEnvPool(ForeignPool):
    """OpenEnv's servers of one environment. Use as `async with`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        request_timeout_s: float,
        max_retries: int = 4,
        patience_s: float = 20.0,
    ) -> None:
        """Prepare a pool. patience_s: retry full or lost servers for at least this long."""
        super().__init__(endpoints, max_retries=max_retries)
        self._timeout_s, self._patience_s = request_timeout_s, patience_s
        self._fields: dict[str, Fields] = {}  # by endpoint

    async def check(self, env: EnvConfig, *, allow_expert: bool) -> Guide:
        """Check that all servers have the same text fields, one of actions, one of observations.
        Result: an empty guide, because these servers have none. The arguments have no effect.
        Errors: EnvError; ValueError naming the endpoint.
        """
        for endpoint in self.endpoints:
            fields, first = await self._fields_of(endpoint), self._fields[self.endpoints[0]]
            if fields != first:
                raise ValueError(
                    f"{endpoint} has text fields {fields}, {self.endpoints[0]} has {first}; name"
                    " servers of one environment"
                )
        return Guide()

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> AsyncIterator[OpenEnvSession]:
        """Yield an open session on the item; close it after the block.
        request_key: sent to the server as a name of the episode. Errors: EnvError; ValueError for
        a server without unique text fields.
        """
        session = await self._repeated(
            lambda: self._begin(self._less_used(), item.task_id, request_key),
            patience_s=self._patience_s,
        )
        with self._counted(session.endpoint):
            try:
                yield session
            finally:
                await session.close()

    async def _begin(self, endpoint: str, task_id: int, episode_id: str) -> OpenEnvSession:
        """Connect to a server, start the task's episode, return the session. If it does not start,
        close the session and raise the error.
        """
        fields = self._fields.get(endpoint) or await self._fields_of(endpoint)
        session = OpenEnvSession(endpoint, fields, await self._connect(endpoint), self._timeout_s)
        try:
            await session.reset(task_id, episode_id)
        except BaseException:
            await session.close()
            raise
        return session

    async def _connect(self, endpoint: str) -> ClientConnection:
        scheme, _, rest = endpoint.partition("://")
        try:
            return await _Direct(
                f"{'wss' if scheme == 'https' else 'ws'}://{rest}/ws",
                additional_headers=self._headers[endpoint],
                compression=None,
                proxy=None,
                open_timeout=self._timeout_s,
                # every request has a deadline; a busy event loop must not end an idle session
                ping_timeout=None,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_MESSAGE_BYTES,
                logger=_handshakes,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            message = (error.response.body or b"")[:200].decode(errors="replace")
            kind = "full" if status == 503 else "protocol"
            raise EnvError(endpoint, "/ws", "", kind, f"status {status}: {message}") from error
        except (WebSocketException, OSError, TimeoutError) as error:
            raise unreachable(endpoint, "/ws", error) from error

    async def _fields_of(self, endpoint: str) -> Fields:
        """Ask a server for the names of its text fields, return and remember them.
        Errors: EnvError; ValueError if there is no text field or more than one candidate.
        """
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(
                    f"{endpoint}/schema", headers=self._headers[endpoint], allow_redirects=False
                ) as response,
            ):
                content, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(endpoint, "/schema", error) from error
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            schema = json.loads(content)
            observation = _text_fields(schema.get("reset_observation") or schema["observation"])
            fields = {"action": _text_fields(schema["action"]), "observation": observation}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            start = content[:200].decode(errors="replace")
            message = f"no schema of an OpenEnv server: status {status}, {start!r}"
            raise EnvError(endpoint, "/schema", "", "protocol", message) from error
        for name, names in fields.items():
            if len(names) != 1:
                which = f"which of {', '.join(names)} is the text" if names else "no text field"
                raise ValueError(
                    f"{endpoint}: {which} of its {name}s? An agent writes and reads one text:"
                    " 'message' or 'text'"
                )
        self._fields[endpoint] = Fields(fields["action"][0], fields["observation"][0])
        return self._fields[endpoint]


def _text_fields(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of a schema's required text fields; of all its text fields if none is
    required. If a name of COMMON is among them, return the first such name alone.
    """
    texts = [
        name
        for name, field in schema["properties"].items()
        if any(option.get("type") == "string" for option in (field, *field.get("anyOf", ())))
    ]
    candidates = [name for name in texts if name in schema.get("required", ())] or texts
    return next(([name] for name in COMMON if name in candidates), candidates)
