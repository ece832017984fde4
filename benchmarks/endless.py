"""Episodes that cost nothing but sampling: an environment server in a process of its own whose
steps take no time, and the real `collect` and HTTP client. For engines.py and gpu.py.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, wait_for, wait_for_url

from agentgym.deploy.owned import owned_process
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


def spec(_: dict[str, Any]) -> EnvSpec:
    return EnvSpec("endless", "", Endless, {}, ())


# the product's server, which knows this environment as if it were built in
SERVE = """
import sys
from envs import __main__, registry
registry.BUILT_IN["endless"] = "endless:spec"
__main__.main(["serve", "endless", "--port", "0", "--max-sessions", "100000", *sys.argv[1:]])
"""


@contextmanager
def serving() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        port, log = Path(folder) / "port", Path(folder) / "log"
        variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        command = [sys.executable, "-c", SERVE, "--port-file", str(port), "--owner-pipe"]
        with owned_process(command, log_path=log, env=variables) as process:
            wait_for(port.exists, 120.0, "no environment server", process, log)
            url = f"http://127.0.0.1:{port.read_text(encoding='utf-8').strip()}"
            wait_for_url(f"{url}/readyz", process, log)
            yield url


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
