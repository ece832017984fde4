"""An app with a simulator that counts its calls, for tests of servers and sessions."""

import asyncio
import math
import time
from contextlib import asynccontextmanager

import httpx

from envs.env import EnvSpec, ExpertFailed, StepResult
from envs.server import ServerSettings, make_app
from envs.wire import CreateReply, ErrorReply


class Counter:
    """Simulator that succeeds at the third action; `crash` raises, `slow` waits, `cut` cuts off."""

    made = 0
    closed = 0
    acted = 0

    def __init__(self):
        type(self).made += 1
        self.count = 0

    def reset(self, task_id):
        if task_id == 13:
            raise RuntimeError("unlucky")
        self.task_id = task_id
        return f"task {task_id}"

    def step(self, action):
        type(self).acted += 1
        self.count += 1
        if action == "crash":
            raise OSError("disk on fire")
        if action == "slow":
            time.sleep(0.2)
        if action == "odd":
            return StepResult("odd", 0.0, False, info={"not json": object()})
        if action == "not a number":
            return StepResult("worth nothing that can be added up", math.nan, False)
        done = self.count == 3
        return StepResult(
            f"{action} {self.count}",
            1.0 if done else 0.0,
            done,
            truncated=action == "cut",
            success=done,
        )

    async def step_async(self, action):
        return await asyncio.to_thread(self.step, action)

    def render(self):
        return "image/png", b"png"

    def expert(self):
        return self

    def next_action(self):
        if self.task_id == 7:
            raise ExpertFailed("no idea")
        while self.task_id == 8:
            pass
        return "onward"

    def close(self):
        type(self).closed += 1


@asynccontextmanager
async def serving(*, blocking=False, awaited=False, probe=("a",), make=None, warm=None, **settings):
    """Yield (client, sessions, simulator class) of a running app."""
    simulator = make or type("Fresh", (Counter,), {"made": 0, "closed": 0, "acted": 0})
    spec = EnvSpec("counter", "count", simulator, {"x": 1}, probe, blocking, awaited, warm=warm)
    app = make_app(
        spec, ServerSettings(**{"drain_timeout_s": 0.2, "expert_timeout_s": 0.2, **settings})
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://env"
        ) as client,
    ):
        for _ in range(100):
            if app.state.sessions.ready or app.state.sessions.failure:
                break
            await asyncio.sleep(0.01)
        yield client, app.state.sessions, simulator


async def create(client, key="k", task_id=0):
    reply = await client.post("/create", json={"request_key": key, "task_id": task_id})
    return (
        CreateReply.model_validate_json(reply.content).session_id
        if reply.status_code == 200
        else refusal(reply)
    )


async def step(client, session_id, turn, action="go"):
    return await client.post(
        "/step", json={"session_id": session_id, "turn": turn, "action": action}
    )


def refusal(reply):
    error = ErrorReply.model_validate_json(reply.content)
    return reply.status_code, error.kind.value
