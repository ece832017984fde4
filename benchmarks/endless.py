"""Episodes that cost nothing but sampling: an environment server in a process of its own whose
steps take no time, and the real `collect` and HTTP client. For engines.py and gpu.py.
"""

from __future__ import annotations

import functools
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.collect import collect
from agentgym.rollouts.episode import EpisodeSettings, token_players
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item, Trajectory
from envs.env import EnvSpec, StepResult

TURNS = 12
ACTION = "move forward and pick up the red ball"
OBSERVATION = "you see a red ball 3 steps ahead, a wall 2 steps left"
SETTINGS = EpisodeSettings(
    seed=0, step=1, max_turns=TURNS, temperature=1.0, max_new_tokens=32, context_tokens=2048
)


class Endless:
    """Simulator without cost whose episodes end only at the horizon."""

    def reset(self, task_id: int) -> str:
        return "task: go to the red ball"

    def step(self, action: str) -> StepResult:
        return StepResult(OBSERVATION, 0.0, terminated=False)

    def render(self) -> tuple[str, bytes]:
        return "text/plain", b""

    def expert(self) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


@functools.cache
def renderer() -> ChatRenderer:
    from agentgym.models.model import train_tokenizer

    texts = [ACTION, OBSERVATION, "turn left", "turn right", "task: go to the red ball"]
    return ChatRenderer(train_tokenizer(texts * 3, 300))


def serve(connection: Any) -> None:
    """Run a server with the product's application and HTTP settings until the pipe is closed."""
    import uvicorn

    from envs.connection import server_config
    from envs.server import ServerSettings, make_app

    spec = EnvSpec("endless", "", Endless, {}, ())
    app = make_app(spec, ServerSettings(max_sessions=100_000, drain_timeout_s=0.1))
    sessions = app.state.sessions
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    config = server_config(app, sessions.settings.max_sessions)
    config.backlog = 4096
    server = uvicorn.Server(config)

    def obey() -> None:
        while not (server.started and sessions.ready):
            time.sleep(0.01)
        connection.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            connection.recv()
        except EOFError:
            sessions.abandon()
            server.should_exit = True

    threading.Thread(target=obey, daemon=True).start()
    server.run(sockets=[listener])


@contextmanager
def serving() -> Iterator[str]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(120):
            raise RuntimeError("the environment server was not ready within 120 s")
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()


async def episodes(endpoint: str, num: int, engine: Any, *, concurrency: int) -> list[Trajectory]:
    async with EnvPool([endpoint], request_timeout_s=60) as pool:
        return await collect(
            [(Item("endless", task), 0) for task in range(num)],
            pool=pool,
            player_of=token_players(engine, renderer()),
            settings=SETTINGS,
            concurrency=concurrency,
            episode_timeout_s=600,
            max_attempts=1,
            max_env_error_frac=0.0,
        )
