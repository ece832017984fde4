"""A WebSocket with OpenEnv's contract, and a server whose sessions must all be closed."""

import asyncio
import contextlib
import json
import time

from websockets.asyncio.client import connect
from websockets.frames import Frame

from envs.env import StepResult, UnknownTask


def await_none(sessions, within_s=5.0):
    """Wait until all sessions are closed. Return False after `within_s`."""
    until = time.monotonic() + within_s
    while sessions.info().active_sessions and time.monotonic() < until:
        time.sleep(0.01)
    return sessions.info().active_sessions == 0


def socket_of(url, **settings):
    return connect(url.replace("http", "ws") + "/ws", proxy=None, compression=None, **settings)


async def ask(socket, message):
    await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(await asyncio.wait_for(socket.recv(), 10))


async def code_of(socket, message):
    reply = await ask(socket, message)
    assert reply["type"] == "error"
    return reply["data"]["code"]


RESET = {"type": "reset", "data": {"seed": 36}}


def step(text):
    return {"type": "step", "data": {"message": text}}


@contextlib.asynccontextmanager
async def served(serving, env="textcraft", options=None, **settings):
    """Yield (url, sessions) of a server; assert that no session is open at the end."""
    with serving(env, options, **settings) as (url, sessions):
        async with asyncio.timeout(60):
            yield url, sessions
        assert await asyncio.to_thread(await_none, sessions)


class Broken:
    """Simulator that fails to reset task 1, does not know task 2, and raises at `break`."""

    def reset(self, task_id):
        if task_id == 2:
            raise UnknownTask("there is no task 2")
        if task_id == 1:
            raise RuntimeError("no world")
        return "begin"

    def step(self, action):
        if action == "break":
            raise RuntimeError("broken \ud800")  # text that cannot be encoded in a message
        return StepResult("on", 0.0, False)

    def close(self): ...


HANDSHAKE = {
    "Host": "127.0.0.1",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def raw_handshake(path="/ws", method="GET", body="", **changes):
    fields = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in changes.items()}}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items() if value is not None),
    ]
    return "\r\n".join([*lines, "", body]).encode("latin-1")


def frame(opcode, data=b"", *, fin=True):
    return Frame(opcode, data, fin=fin).serialize(mask=True)
