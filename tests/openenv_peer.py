"""OpenEnv's client and server, for the tests; run it with that package on the path, see
`tests/openenv.txt`.

`openenv_peer.py play` reads the moves from stdin and writes the observations to stdout.
`openenv_peer.py serve NAME PORT_FILE MOST` serves one of our simulators through OpenEnv's server,
at most MOST sessions at once.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from agentgym.deploy.owned import end_with_owner
from envs.registry import load_spec


class Said(Action):
    message: str


class Seen(Observation):
    text: str


class Wrapped(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    spec = None

    def __init__(self):
        super().__init__()
        self._world = self.spec.make()
        self._state = State()

    def reset(self, seed=None, episode_id=None):
        self._state = State(episode_id=episode_id)
        return Seen(text=self._world.reset(seed))

    def step(self, action, timeout_s=None):
        result = self._world.step(action.message)
        self._state.step_count += 1
        return Seen(
            text=result.observation,
            reward=result.reward,
            done=result.terminated or result.truncated,
        )

    @property
    def state(self):
        return self._state


def serve(name, port_file, most):
    end_with_owner()
    Wrapped.spec = load_spec(name, {})
    app = create_fastapi_app(Wrapped, Said, Seen, max_concurrent_envs=int(most))

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            part = Path(f"{port_file}.part")
            part.write_text(str(self.servers[0].sockets[0].getsockname()[1]))
            part.rename(port_file)

    Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")).run()


async def play(url, token, episodes):
    told = []
    async with GenericEnvClient(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, message_timeout_s=30
    ) as client:
        for number, (seed, actions) in enumerate(episodes):
            shown = [await client.reset(seed=seed, episode_id=f"episode {number}")]
            shown += [await client.step({"message": action}) for action in actions]
            rows = [
                [each.observation["text"], each.reward, each.done, each.metadata["success"]]
                for each in shown
            ]
            told.append({"rows": rows, "state": await client.state()})
        try:
            await client.step({"message": "again"})
        except RuntimeError as error:
            told.append(str(error))
    return told


if sys.argv[1] == "serve":
    serve(*sys.argv[2:])
else:
    json.dump(asyncio.run(play(**json.load(sys.stdin))), sys.stdout)
